"""The math kernel: the definition, in float32, on any device, for any mask. The yardstick of the others.

Memory: forward holds the scores twice, backward about four times, each [B, H, S, T] in float32 (float64 for
float64): 4 GiB a copy for 12 heads at 9,500 tokens. It is for short sequences, and for what no other serves.
"""

from __future__ import annotations

import torch

from tc_volta.record import Kernel, Pair, Saved, Triple
from tc_volta.request import Request, lse_dtype


def _never(request: Request) -> str:
    return ""


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


MATH = Kernel(name="math", unusable=_never, forward=_math_forward, backward=math_backward)
