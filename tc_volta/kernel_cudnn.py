"""cuDNN's fused attention, on sm_80 and later."""

from __future__ import annotations

import torch

from tc_volta.bias import expanded_bias
from tc_volta.record import Kernel, Pair, Saved, Triple
from tc_volta.request import Request

_aten = torch.ops.aten


def _cudnn_unusable(r: Request) -> str:
    if r.device != "cuda":
        return "cuDNN is for CUDA"
    if r.capability < (8, 0):
        return f"cuDNN attention needs sm_80; this is sm_{r.capability[0]}{r.capability[1]}"
    if r.dtype not in (torch.float16, torch.bfloat16):
        return f"cuDNN attention takes float16 and bfloat16, not {r.dtype}"
    if r.head_dim % 8 or r.head_dim > 128:
        return f"head_dim {r.head_dim} is not a multiple of 8 up to 128"
    if r.seq_q < 2 or r.seq_k < 2:
        return f"needs two queries and two keys at least; got {r.seq_q} and {r.seq_k}"
    return ""


def _cudnn_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    causal: bool,
    window: int,
    scale: float,
) -> Pair:
    out, lse = _aten._scaled_dot_product_cudnn_attention(
        q, k, v, expanded_bias(bias, q), True, 0.0, causal, False, scale=scale
    )[:2]
    return out, lse.squeeze(-1) if lse.dim() == 4 else lse


def _cudnn_backward(dout: torch.Tensor, s: Saved) -> Triple:
    seed = torch.zeros((), dtype=torch.int64, device=s.q.device)  # of dropout, which is 0
    dq, dk, dv = _aten._scaled_dot_product_cudnn_attention_backward(
        dout,
        s.q,
        s.k,
        s.v,
        s.out,
        s.lse.unsqueeze(-1).contiguous(),
        seed,
        seed,
        expanded_bias(s.bias, s.q),
        None,
        None,
        s.q.shape[2],
        s.k.shape[2],
        0.0,
        s.causal,
        scale=s.scale,
    )
    return dq, dk, dv


CUDNN = Kernel(name="cudnn", unusable=_cudnn_unusable, forward=_cudnn_forward, backward=_cudnn_backward)
