"""What a tile does row by row, in Triton on a GPU and in torch's own operations elsewhere.

The torch formulas are the definition; `triton_rows` repeats them in one kernel each and is held to them by tests.
Legend: T rows of a tile, V vocabulary.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
from collections.abc import Iterator
from types import ModuleType

import torch
from torch import Tensor

from cp_volta.activation import ACTIVATIONS
from cp_volta.matmul import sum_dtype

_FUSED = (torch.float32, torch.float16, torch.bfloat16)
_off = 0


@contextlib.contextmanager
def without_triton() -> Iterator[None]:
    """Inside, torch's operations everywhere: to compare, or to find out whether a kernel is at fault."""
    global _off
    _off += 1
    try:
        yield
    finally:
        _off -= 1


def kernels(x: Tensor) -> ModuleType | None:
    """The Triton kernels where they serve x: on a GPU, not in float64, not switched off; None elsewhere."""
    if _off or x.dtype not in _FUSED or not (x.is_cuda or _interpreted()):
        return None
    return _triton_rows()


def served_by(device: str) -> tuple[str, str]:
    """(what computes rows on a kind of device, why): to be told, since nobody asks for it."""
    if device != "cuda":
        return "torch's operations", "there is no CUDA device"
    if _triton_rows() is None:
        return (
            "torch's operations",
            "Triton is not installed: slower, and a tile takes two to three times as much",
        )
    return "Triton", "one kernel in place of several"


def _interpreted() -> bool:
    """Triton's interpreter runs kernels on a CPU, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def _triton_rows() -> ModuleType | None:
    if importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module("cp_volta.triton_rows")


def cross_entropy_(
    logits_TV: Tensor, labels_T: Tensor, power: Tensor, ignore_index: int, grad: bool
) -> tuple[Tensor, Tensor]:
    """(sum of the losses, with `grad` dlogits [T, V] times `power`), of logits that may be overwritten.

    dlogits are softmax minus onehot, zero where a token does not count. The sum is float32 (float64 of float64).
    """
    if (fused := kernels(logits_TV)) is not None:
        losses_T = fused.cross_entropy_(logits_TV, labels_T, power, ignore_index, grad)
        return losses_T.sum(), logits_TV
    logp_TV = torch.log_softmax(logits_TV, -1, dtype=sum_dtype(logits_TV.dtype))
    counts_T = labels_T != ignore_index
    target_T1 = torch.where(counts_T, labels_T, 0)[:, None]
    loss = -logp_TV.gather(1, target_T1).squeeze(1).masked_fill(~counts_T, 0.0).sum()
    if not grad:
        return loss, logits_TV
    p_TV = logp_TV.exp_()
    p_TV.scatter_add_(1, target_T1, p_TV.new_full((), -1.0).expand(len(target_T1), 1))
    factor_T1 = (counts_T * power)[:, None]
    return loss, torch.mul(p_TV, factor_T1, out=p_TV if p_TV.dtype == logits_TV.dtype else logits_TV)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x over its root mean square along the last dimension, times weight; rounded where transformers rounds."""
    if (fused := kernels(x)) is not None:
        normed: Tensor = fused.rms_norm(x, weight, eps)
        return normed
    wide = x.to(sum_dtype(x.dtype))
    unit = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * unit.to(x.dtype)


def rms_norm_backward(dy: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(dx in x's dtype, values [n, features] whose sum over n is dweight)."""
    if (fused := kernels(x)) is not None:
        grads: tuple[Tensor, Tensor] = fused.rms_norm_backward(dy, x, weight, eps)
        return grads
    wide = x.to(sum_dtype(x.dtype))
    inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    unit = wide * inverse
    dy = dy.to(wide.dtype)
    along = dy * weight
    dx = (along - unit * (along * unit).mean(-1, keepdim=True)).mul_(inverse)
    return dx.to(x.dtype), (dy * unit).flatten(0, -2)


def gate_(g: Tensor, u: Tensor, activation: str) -> Tensor:
    """act(g) * u; g may be overwritten."""
    if activation in ("silu", "swish") and (fused := kernels(g)) is not None:
        product: Tensor = fused.swiglu_(g, u)
        return product
    return ACTIVATIONS[activation].forward(g).mul_(u)


def gate_backward_(g: Tensor, u: Tensor, dp: Tensor, activation: str) -> tuple[Tensor, Tensor, Tensor]:
    """(dg, du, act(g) * u) of the product's gradient dp; all three inputs may be overwritten."""
    if activation in ("silu", "swish") and (fused := kernels(g)) is not None:
        fused.swiglu_backward_(g, u, dp)
        return g, u, dp
    act = ACTIVATIONS[activation]
    a = act.forward(g)
    product = a * u
    dg = act.backward(u.mul_(dp), g)
    return dg, a.mul_(dp), product
