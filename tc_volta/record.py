"""What an attention kernel is: one record, and what its forward leaves for its backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tc_volta.request import Request

Pair = tuple[torch.Tensor, torch.Tensor]
Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What forward leaves for backward. `bias` and causality are as the kernel got them."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    bias: torch.Tensor | None
    causal: bool
    window: int
    scale: float


Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, "torch.Tensor | None", bool, int, float], Pair]
Backward = Callable[[torch.Tensor, Saved], Triple]


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One attention implementation.

    unusable: why a request cannot be served, or "". grouped, windowed_on: takes compact K/V heads, a window,
    itself; where not, heads are expanded and the window becomes part of the bias.
    """

    name: str
    unusable: Callable[[Request], str]
    forward: Forward
    backward: Backward
    grouped: bool = False
    windowed_on: tuple[str, ...] = ()
