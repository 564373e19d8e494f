"""FlashAttention-2 on sm_80 and later; on a CPU torch's fused kernel of the same name, which also takes a mask."""

from __future__ import annotations

import torch

from tc_volta.record import Kernel, Pair, Saved, Triple
from tc_volta.request import Request

_aten = torch.ops.aten
# The backward of head dims above 192 does not fit here; torch's sdp_utils.cpp refuses it too.
_SMALL_SHARED_MEMORY = ((8, 6), (8, 9), (12, 0), (12, 1))


def _flash_unusable(r: Request) -> str:
    if r.device == "cpu":
        known = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
        return "" if r.dtype in known else f"no kernel for {r.dtype}"
    if r.device != "cuda":
        return f"no kernel for {r.device}"
    if r.capability < (8, 0):
        return f"FlashAttention needs sm_80; this is sm_{r.capability[0]}{r.capability[1]}"
    if r.dtype not in (torch.float16, torch.bfloat16):
        return f"FlashAttention takes float16 and bfloat16, not {r.dtype}"
    if r.masked:
        return "FlashAttention takes no mask"
    if r.head_dim % 8 or r.head_dim > 256:
        return f"head_dim {r.head_dim} is not a multiple of 8 up to 256"
    if 192 < r.head_dim <= 224 and r.capability in _SMALL_SHARED_MEMORY:
        return f"head_dim {r.head_dim} has no backward on sm_{r.capability[0]}{r.capability[1]}"
    return ""


def _flash_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    causal: bool,
    window: int,
    scale: float,
) -> Pair:
    if q.device.type == "cpu":
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=bias, scale=scale
        )
        return out, lse
    out, lse = _aten._flash_attention_forward(
        *(x.transpose(1, 2) for x in (q, k, v)),
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        causal,
        False,
        scale=scale,
        window_size_left=window - 1 if window else None,
        window_size_right=0 if window else None,
    )[:2]
    return out.transpose(1, 2), lse


def _flash_backward(dout: torch.Tensor, s: Saved) -> Triple:
    if s.q.device.type == "cpu":
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, s.q, s.k, s.v, s.out, s.lse, 0.0, s.causal, attn_mask=s.bias, scale=s.scale
        )
        return dq, dk, dv
    rng = torch.zeros(2, dtype=torch.uint64, device=s.q.device)  # of dropout, which is 0
    q, k, v, out, grad = (x.transpose(1, 2) for x in (s.q, s.k, s.v, s.out, dout))
    grads = _aten._flash_attention_backward(
        grad.contiguous(),
        q,
        k,
        v,
        out,
        s.lse.contiguous(),
        None,
        None,
        q.shape[1],
        k.shape[1],
        0.0,
        s.causal,
        rng,
        rng[:1],
        scale=s.scale,
        window_size_left=s.window - 1 if s.window else None,
        window_size_right=0 if s.window else None,
    )
    dq, dk, dv = (g.transpose(1, 2) for g in grads)
    return dq, dk, dv


FLASH = Kernel(
    name="flash",
    unusable=_flash_unusable,
    forward=_flash_forward,
    backward=_flash_backward,
    grouped=True,
    windowed_on=("cuda",),
)
