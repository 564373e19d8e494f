"""The CUTLASS kernel, memory linear in S, from sm_50 on: the one fused kernel of a V100.

Reached through aten ("efficient") or xformers ("xformers"); since xformers 0.0.29 they are one kernel. Its traps:
lse is padded to a multiple of 32 queries, heads are not grouped, causal is aligned top-left.
"""

from __future__ import annotations

from typing import Any

import torch

from tc_volta.bias import expanded_bias
from tc_volta.record import Kernel, Pair, Saved, Triple
from tc_volta.request import Request

_aten = torch.ops.aten


def _cutlass_unusable(r: Request) -> str:
    if r.device != "cuda":
        return "the CUTLASS kernel is for CUDA"
    if r.capability < (5, 0):
        return f"needs sm_50; this is sm_{r.capability[0]}{r.capability[1]}"
    if r.dtype == torch.bfloat16 and r.capability < (8, 0):
        return f"bfloat16 needs sm_80; this is sm_{r.capability[0]}{r.capability[1]}"
    if r.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"no kernel for {r.dtype}"
    multiple = 4 if r.dtype == torch.float32 else 8
    return f"head_dim {r.head_dim} is no multiple of {multiple}" if r.head_dim % multiple else ""


def _aligned_lse(lse: torch.Tensor) -> torch.Tensor:
    """The kernel reads lse in blocks of 32 queries; +inf makes the padding's probabilities zero."""
    missing = -lse.shape[-1] % 32
    return torch.nn.functional.pad(lse, (0, missing), value=torch.inf) if missing else lse.contiguous()


def _efficient_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    causal: bool,
    window: int,
    scale: float,
) -> Pair:
    out, lse, _, _ = _aten._scaled_dot_product_efficient_attention(
        q, k, v, expanded_bias(bias, q), True, 0.0, causal, scale=scale
    )
    return out, lse[..., : q.shape[2]]


def _efficient_backward(dout: torch.Tensor, s: Saved) -> Triple:
    seed = torch.zeros((), dtype=torch.int64, device=s.q.device)  # of dropout, which is 0
    dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
        dout,
        s.q,
        s.k,
        s.v,
        expanded_bias(s.bias, s.q),
        s.out,
        _aligned_lse(s.lse),
        seed,
        seed,
        0.0,
        [True, True, True, False],
        s.causal,
        scale=s.scale,
    )
    return dq, dk, dv


def _xformers_unusable(r: Request) -> str:
    return _cutlass_unusable(r) or _xformers_missing()


def _xformers_missing() -> str:
    """Why xformers cannot be used. Imported here, late: its import initialises CUDA, which a fork must not inherit."""
    try:
        import xformers.ops.fmha.cutlass  # noqa: F401
    except ImportError as error:
        return f"xformers cannot be imported: {error}"
    return ""


def _xformers(causal: bool, bias: torch.Tensor | None) -> tuple[Any, Any]:
    from xformers.ops import fmha

    return fmha, fmha.LowerTriangularMask() if causal else bias


def _xformers_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    causal: bool,
    window: int,
    scale: float,
) -> Pair:
    fmha, attn_bias = _xformers(causal, expanded_bias(bias, q))
    out, lse = fmha.memory_efficient_attention_forward_requires_grad(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_bias, scale=scale, op=fmha.cutlass.FwOp
    )
    return out.transpose(1, 2), lse[..., : q.shape[2]]


def _xformers_backward(dout: torch.Tensor, s: Saved) -> Triple:
    fmha, attn_bias = _xformers(s.causal, expanded_bias(s.bias, s.q))
    grads = fmha.memory_efficient_attention_backward(
        dout.transpose(1, 2),
        s.out.transpose(1, 2),
        _aligned_lse(s.lse),
        *(x.transpose(1, 2) for x in (s.q, s.k, s.v)),
        attn_bias,
        scale=s.scale,
        op=fmha.cutlass.BwOp,
    )
    dq, dk, dv = (g.transpose(1, 2) for g in grads)
    return dq, dk, dv


EFFICIENT = Kernel(
    name="efficient", unusable=_cutlass_unusable, forward=_efficient_forward, backward=_efficient_backward
)
XFORMERS = Kernel(
    name="xformers", unusable=_xformers_unusable, forward=_xformers_forward, backward=_xformers_backward
)
