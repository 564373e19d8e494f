"""The activations of a gated MLP, and their derivatives, by transformers' names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Activation:
    """forward(x) and backward(dy, x), elementwise."""

    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]


ACTIVATIONS = {
    "silu": Activation(F.silu, torch.ops.aten.silu_backward),
    "gelu": Activation(F.gelu, torch.ops.aten.gelu_backward),
    "gelu_pytorch_tanh": Activation(
        lambda x: F.gelu(x, approximate="tanh"),
        lambda dy, x: torch.ops.aten.gelu_backward(dy, x, approximate="tanh"),
    ),
    "relu": Activation(F.relu, lambda dy, x: dy * (x > 0)),
}
ACTIVATIONS["swish"] = ACTIVATIONS["silu"]


def check_activation(name: str) -> None:
    """Raise ValueError for an activation whose derivative is not written down here."""
    if name not in ACTIVATIONS:
        raise ValueError(f"activation {name!r} cannot be tiled; there are {', '.join(ACTIVATIONS)}")
