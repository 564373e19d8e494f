"""One attention call: its inputs, its mask, the kernel that is asked, and the same in float64, written out.

Dimensions: B batch, H query heads, G key/value heads, S queries, T keys (as many), D head dim.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import tc_volta
from probes.models.build import DTYPES
from probes.sdpa_backends import SdpaAxes, Shape

_TORCH = {
    "math": SDPBackend.MATH,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


class Inputs(NamedTuple):
    """q, dout [B, H, S, D]; k, v [B, G, T, D]; mask broadcastable to [B, H, S, T], or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    mask: Tensor | None


def inputs(axes: SdpaAxes, shape: Shape, device: str, seed: int) -> Inputs:
    """Normal numbers rounded to the axes' dtype, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v, dout = (
        torch.randn(axes.batch, heads, shape.seq, shape.head_dim, generator=generator)
        .to(DTYPES[axes.dtype])
        .to(device)
        for heads in (axes.heads, shape.kv_heads, shape.kv_heads, axes.heads)
    )
    given = _mask(axes, shape.seq, generator)
    return Inputs(q, k, v, dout, None if given is None else given.to(device))


def _mask(axes: SdpaAxes, seq: int, generator: torch.Generator) -> Tensor | None:
    """The mask that is handed over. Padding hides a quarter of the first sequence, half of the second, and so on."""
    if axes.mask in ("none", "causal"):
        return None
    earlier = torch.ones(seq, seq, dtype=torch.bool).tril()
    if axes.mask == "additive":
        bias = torch.randn(1, axes.heads, seq, seq, generator=generator)
        return bias.masked_fill(~earlier, -torch.inf).to(DTYPES[axes.dtype])
    hidden = torch.tensor([max(1, seq * (1 + row % 2) // 4) for row in range(axes.batch)])[:, None]
    at = torch.arange(seq)
    if axes.mask == "padding":
        return (at < seq - hidden)[:, None, None]
    return (at >= hidden)[:, None, None] & earlier


def attend(axes: SdpaAxes, given: Inputs) -> Tensor:
    """out [B, H, S, D] by the kernel that the axes name. Raises what torch or tc_volta refuse with."""
    q, k, v, _, mask = given
    causal = axes.mask == "causal"
    if axes.through == "tc_volta":
        out = tc_volta.flash_attn(q, k, v, attn_mask=mask, causal=causal, kernel=axes.kernel)
        return cast("Tensor", out)
    named = contextlib.nullcontext() if axes.kernel == "auto" else sdpa_kernel(_TORCH[axes.kernel])
    with named:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
        )


class Ruler(NamedTuple):
    """A tensor in float64, and what its error is divided by: the largest magnitude in it or in the terms it is made of."""

    value: Tensor
    scale: float


def reference(given: Inputs, *, causal: bool) -> list[Ruler]:
    """out, dq, dk, dv in float64, from the definition. A query that sees no key is zero, and gives no gradient.

    dq and dk are differences of two terms, P * dP and P * delta, and a fused kernel has delta from an output that was
    rounded to dtype: where they cancel (a query that sees two keys), the error is theirs, not the difference's.
    Source: FlashAttention (arXiv:2205.14135), appendix B.4.
    """
    q, k, v, dout = (x.detach().double() for x in given[:4])
    factor, group = q.shape[-1] ** -0.5, q.shape[1] // k.shape[1]
    keys, values = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    p = _probabilities(q @ keys.mT * factor, given.mask, causal)
    out = p @ values
    rising = p * (dout @ values.mT) * factor
    falling = p * (dout * out).sum(-1, keepdim=True) * factor
    return [
        _ruler(out),
        _ruler(rising @ keys, falling @ keys),
        _ruler(_grouped(rising.mT @ q, k.shape[1]), _grouped(falling.mT @ q, k.shape[1])),
        _ruler(_grouped(p.mT @ dout, k.shape[1])),
    ]


def _ruler(plus: Tensor, minus: Tensor | None = None) -> Ruler:
    value = plus if minus is None else plus - minus
    parts = [value, plus] if minus is None else [value, plus, minus]
    return Ruler(value, max(float(part.abs().max()) for part in parts) or 1.0)


def _probabilities(scores: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    hidden = torch.zeros(scores.shape[-2:], dtype=torch.bool, device=scores.device)
    if causal:
        hidden = torch.ones_like(hidden).triu(1)
    if mask is not None and mask.dtype == torch.bool:
        hidden = hidden | ~mask
    elif mask is not None:
        scores = scores + mask.double()
    blind = hidden.all(-1, keepdim=True)
    return scores.masked_fill(hidden & ~blind, -torch.inf).softmax(-1).masked_fill(blind, 0.0)


def _grouped(x: Tensor, kv_heads: int) -> Tensor:
    """[B, H, T, D] summed over the query heads of each key/value head: [B, G, T, D]."""
    summed: Tensor = x.unflatten(1, (kv_heads, -1)).sum(2)
    return summed
