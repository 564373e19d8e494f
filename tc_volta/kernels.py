"""The kernels behind tc_volta::flash_attn: one record each, with what it cannot do and why.

A kernel returns (out, lse) and takes them back in its backward, so that partial results over key blocks can be
merged. To add one, add a record to KERNELS.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tc_volta.request import Request, lse_dtype

_aten = torch.ops.aten
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


# ---- math: the definition, in float32, any device -------------------------------------------------------------


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(lse_dtype(x.dtype))


def _scores(
    q: torch.Tensor, k: torch.Tensor, bias: torch.Tensor | None, causal: bool, scale: float
) -> torch.Tensor:
    scores = _wide(q) @ _wide(k).mT * scale
    if bias is not None:
        scores = scores + bias
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill_(hidden, -torch.inf)
    return scores


def _math_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    causal: bool,
    window: int,
    scale: float,
) -> Pair:
    scores = _scores(q, k, bias, causal, scale)
    lse = scores.logsumexp(-1)
    out = (scores - lse[..., None]).exp_() @ _wide(v)
    return out.to(q.dtype), lse


def math_backward(dout: torch.Tensor, s: Saved, dlse: torch.Tensor | None = None) -> Triple:
    """dQ, dK, dV from the definition; the only backward that also takes a gradient of lse.

    Source: FlashAttention (arXiv:2205.14135), appendix B.4; d lse / d scores is the probabilities themselves.
    """
    probs = (_scores(s.q, s.k, s.bias, s.causal, s.scale) - s.lse[..., None]).exp_()
    dout_wide = _wide(dout)
    delta = (dout_wide * _wide(s.out)).sum(-1, keepdim=True)
    if dlse is not None:
        delta = delta - dlse[..., None]
    dscores = probs * (dout_wide @ _wide(s.v).mT - delta) * s.scale
    dq = dscores @ _wide(s.k)
    dk = dscores.mT @ _wide(s.q)
    dv = probs.mT @ dout_wide
    return dq.to(s.q.dtype), dk.to(s.k.dtype), dv.to(s.v.dtype)


# ---- efficient: CUTLASS, through aten or xformers -------------------------------------------------------------


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


def _expanded_bias(bias: torch.Tensor | None, q: torch.Tensor) -> torch.Tensor | None:
    return None if bias is None else bias.expand(q.shape[0], q.shape[1], -1, -1)


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
        q, k, v, _expanded_bias(bias, q), True, 0.0, causal, scale=scale
    )
    return out, lse[..., : q.shape[2]]


def _efficient_backward(dout: torch.Tensor, s: Saved) -> Triple:
    seed = torch.zeros((), dtype=torch.int64, device=s.q.device)  # of dropout, which is 0
    dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
        dout,
        s.q,
        s.k,
        s.v,
        _expanded_bias(s.bias, s.q),
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
    why = _cutlass_unusable(r)
    if why:
        return why
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
    fmha, attn_bias = _xformers(causal, _expanded_bias(bias, q))
    out, lse = fmha.memory_efficient_attention_forward_requires_grad(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_bias, scale=scale, op=fmha.cutlass.FwOp
    )
    return out.transpose(1, 2), lse[..., : q.shape[2]]


def _xformers_backward(dout: torch.Tensor, s: Saved) -> Triple:
    fmha, attn_bias = _xformers(s.causal, _expanded_bias(s.bias, s.q))
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


# ---- flash: FlashAttention-2 on sm_80 and later, the fused CPU kernel on a CPU ---------------------------------


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


# ---- cudnn ----------------------------------------------------------------------------------------------------


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
        q, k, v, _expanded_bias(bias, q), True, 0.0, causal, False, scale=scale
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
        _expanded_bias(s.bias, s.q),
        None,
        None,
        s.q.shape[2],
        s.k.shape[2],
        0.0,
        s.causal,
        scale=s.scale,
    )
    return dq, dk, dv


def _never(request: Request) -> str:
    return ""


# In order of preference for "auto": the fastest first, on the cards that have it.
KERNELS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        Kernel(
            name="flash",
            unusable=_flash_unusable,
            forward=_flash_forward,
            backward=_flash_backward,
            grouped=True,
            windowed_on=("cuda",),
        ),
        Kernel(name="cudnn", unusable=_cudnn_unusable, forward=_cudnn_forward, backward=_cudnn_backward),
        Kernel(
            name="efficient",
            unusable=_cutlass_unusable,
            forward=_efficient_forward,
            backward=_efficient_backward,
        ),
        Kernel(
            name="xformers",
            unusable=_xformers_unusable,
            forward=_xformers_forward,
            backward=_xformers_backward,
        ),
        Kernel(name="math", unusable=_never, forward=_math_forward, backward=math_backward),
    )
}
