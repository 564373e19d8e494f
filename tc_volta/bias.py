"""A call's mask, causality and window as one additive bias; and what becomes of a query that sees no key."""

from __future__ import annotations

import torch

from tc_volta.request import Request


def bias_of(
    mask: torch.Tensor | None, request: Request, like: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Mask, causality and window as one additive bias, and the queries that see no key.

    mask: bool (True: may look) or additive, broadcastable to [B, H, S, T]. Returns (bias, blind), bias
    [B or 1, H or 1, S, T] in the inputs' dtype with rows a multiple of 16 elements apart (fused kernels read
    16 bytes at once), blind [.., S, 1] bool or None. A blind row's bias is 0: kernels disagree on a row of -inf
    (CPU flash answers lse 0), so it looks at everything and its output is overwritten by `unsee`.
    """
    if mask is None and not request.window:
        return None, None
    allowed = _structure(request, like.device)
    if mask is not None and mask.dtype == torch.bool:
        allowed = mask if allowed is None else allowed & mask
        mask = None
    full = (mask if mask is not None else allowed).shape  # type: ignore[union-attr]
    if allowed is not None:
        full = torch.broadcast_shapes(full, allowed.shape)
    full = torch.broadcast_shapes(full, (1, 1, request.seq_q, request.seq_k))
    padded = -(-request.seq_k // 16) * 16
    bias = torch.zeros((*full[:-1], padded), dtype=like.dtype, device=like.device)[..., : request.seq_k]
    if mask is not None:
        bias += mask
    if allowed is not None:
        bias.masked_fill_(~allowed, -torch.inf)
    blind = (bias <= torch.finfo(like.dtype).min).all(-1, keepdim=True)
    bias.masked_fill_(blind, 0.0)
    return bias, blind


def _structure(request: Request, device: torch.device) -> torch.Tensor | None:
    """Causality and window as bool [1, 1, S, T]; None where neither is asked for."""
    if not request.causal:
        return None
    back = torch.arange(request.seq_q, device=device)[:, None] - torch.arange(request.seq_k, device=device)
    seen = back >= 0
    if request.window:
        seen &= back < request.window
    return seen[None, None]


def unsee(
    out_BHSD: torch.Tensor, lse_BHS: torch.Tensor, blind: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Zero the output and set lse to -inf where a query saw no key."""
    if blind is None:
        return out_BHSD, lse_BHS
    return out_BHSD.masked_fill(blind, 0.0), lse_BHS.masked_fill(blind.squeeze(-1), -torch.inf)


def expanded_bias(bias: torch.Tensor | None, q_BHSD: torch.Tensor) -> torch.Tensor | None:
    """The bias over every sequence and head, as views: what kernels that do not broadcast ask for."""
    return None if bias is None else bias.expand(q_BHSD.shape[0], q_BHSD.shape[1], -1, -1)
