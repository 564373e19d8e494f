"""Attention by its definition in float64, and the error of a kernel of tc_volta against it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

import tc_volta

# Relative error of the norm against float64; a unit in the last place is 6e-8, 4.9e-4 and 3.9e-3.
BAR = {torch.float32: 3e-6, torch.float16: 1.5e-3, torch.bfloat16: 1.2e-2, torch.float64: 1e-13}


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


def inputs(
    heads: tuple[int, int] = (4, 2),
    seq: int = 33,
    dim: int = 64,
    dtype: torch.dtype = torch.float32,
    seq_k: int | None = None,
    batch: int = 2,
    device: str = "cpu",
) -> Inputs:
    torch.manual_seed(0)
    how = {"dtype": dtype, "device": device}
    q, dout = (torch.randn(batch, heads[0], seq, dim, **how) for _ in range(2))
    k, v = (torch.randn(batch, heads[1], seq_k or seq, dim, **how) for _ in range(2))
    return Inputs(*(x.requires_grad_() for x in (q, k, v)), dout)


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False, window: int = 0
) -> tuple[Tensor, Tensor]:
    """The definition, in the inputs' own dtype; a query that sees no key answers 0, lse -inf."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.mT * q.shape[-1] ** -0.5
    back = torch.arange(q.shape[2], device=q.device)[:, None] - torch.arange(k.shape[2], device=q.device)
    seen = back >= 0 if causal else torch.ones_like(back, dtype=torch.bool)
    if window:
        seen = seen & (back < window)
    if mask is not None and mask.dtype == torch.bool:
        seen = seen & mask
    elif mask is not None:
        scores = scores + mask
    scores = scores.masked_fill(~seen, -torch.inf)
    lse = scores.logsumexp(-1)
    probs = (scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    return probs @ v, lse


def reference(given: Inputs, **how: object) -> list[Tensor]:
    """[out, lse, dq, dk, dv] in float64."""
    q, k, v = (x.detach().double().requires_grad_() for x in given[:3])
    mask = how.pop("mask", None)
    if isinstance(mask, Tensor) and mask.is_floating_point():
        mask = mask.double()
    out, lse = attention(q, k, v, mask, **how)  # type: ignore[arg-type]
    return [out, lse, *torch.autograd.grad(out, (q, k, v), given.dout.double())]


def ours(given: Inputs, kernel: str, **how: object) -> list[Tensor]:
    """[out, lse, dq, dk, dv] of one kernel."""
    how["attn_mask"] = how.pop("mask", None)
    out, lse = tc_volta.flash_attn(*given[:3], kernel=kernel, return_lse=True, **how)  # type: ignore[arg-type]
    return [out, lse, *torch.autograd.grad(out, given[:3], given.dout)]


def worst(got: list[Tensor], want: list[Tensor]) -> float:
    """The largest relative error; rows that saw no key must be so on both sides."""
    blind = want[1] == -torch.inf
    assert torch.equal(got[1] == -torch.inf, blind)
    got[1], want[1] = got[1].masked_fill(blind, 0.0), want[1].masked_fill(blind, 0.0)
    return max(((g.double() - w).norm() / w.norm()).item() for g, w in zip(got, want, strict=True))
