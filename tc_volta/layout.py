"""How q, k, v and their gradients lie in memory, and how grouped heads are expanded and summed again."""

from __future__ import annotations

import torch

from tc_volta.request import lse_dtype


def expand(kv_BGTD: torch.Tensor, heads: int) -> torch.Tensor:
    """[B, G, T, D] -> [B, H, T, D]: each key/value head for each query head of its group."""
    if kv_BGTD.shape[1] == heads:
        return kv_BGTD
    return kv_BGTD.repeat_interleave(heads // kv_BGTD.shape[1], dim=1)


def reduce(grad_BHTD: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[B, H, T, D] -> [B, G, T, D]: the gradient of `expand`, summed in float32."""
    H = grad_BHTD.shape[1]
    if kv_heads == H:
        return grad_BHTD
    grouped = grad_BHTD.unflatten(1, (kv_heads, H // kv_heads))
    wide: torch.Tensor = grouped.sum(2, dtype=lse_dtype(grad_BHTD.dtype))
    return wide.to(grad_BHTD.dtype)


def as_bshd(x_BHSD: torch.Tensor) -> torch.Tensor:
    """The same values, in memory as [B, S, H, D]: one layout for every kernel, known when tracing.

    as_strided, because `contiguous` leaves the stride of a dimension of size 1 as it finds it.
    """
    B, H, S, D = x_BHSD.shape
    return x_BHSD.transpose(1, 2).contiguous().as_strided((B, H, S, D), (S * H * D, D, H * D, 1))


def packed(lse_BHS: torch.Tensor) -> torch.Tensor:
    """The same values, in memory as [B, H, S], whatever block a kernel padded them to."""
    B, H, S = lse_BHS.shape
    return lse_BHS.contiguous().as_strided((B, H, S), (H * S, S, 1))


def empty_bshd(like_BHSD: torch.Tensor) -> torch.Tensor:
    """Uninitialised, shaped [B, H, S, D] as `like_BHSD`, in memory as `as_bshd` has it."""
    B, H, S, D = like_BHSD.shape
    return like_BHSD.new_empty((B, S, H, D)).transpose(1, 2)


def dense(x_BHSD: torch.Tensor) -> torch.Tensor:
    """The same values with rows that fused kernels can read: D contiguous, nothing broadcast.

    The gradient of a sum is one number with all strides 0, and CUTLASS and FlashAttention refuse it.
    """
    broadcast = any(
        stride == 0 and size > 1 for stride, size in zip(x_BHSD.stride(), x_BHSD.shape, strict=True)
    )
    return x_BHSD.contiguous() if broadcast or x_BHSD.stride(-1) != 1 else x_BHSD
