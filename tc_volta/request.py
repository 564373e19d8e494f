"""What an attention call asks for, and the conventions every kernel follows.

Dimensions: B batch, H query heads, G key/value heads (H a multiple of G), S queries, T keys, D head dim.
Layout: [B, H, S, D] as torch's scaled_dot_product_attention. Outputs lie in memory as [B, S, H, D], the order
in which fused kernels write them and in which the next projection reads them.
lse is the natural logarithm of the sum of exp(scaled score), float32 (float64 for float64), [B, H, S];
-inf for a query that saw no key, whose output is zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Request:
    """One call's shape and wishes; what a kernel's `unusable` judges."""

    device: str  # "cpu" or "cuda"
    capability: tuple[int, int]  # (0, 0) on a CPU
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    seq_q: int
    seq_k: int
    causal: bool = False
    masked: bool = False
    window: int = 0  # keys seen by a query, itself included; 0: all

    @property
    def grouped(self) -> bool:
        return self.heads != self.kv_heads


def request_of(
    q_BHSD: torch.Tensor, k_BGTD: torch.Tensor, mask: torch.Tensor | None, causal: bool, window: int
) -> Request:
    """The request that these tensors are."""
    return Request(
        device=q_BHSD.device.type,
        capability=torch.cuda.get_device_capability(q_BHSD.device) if q_BHSD.is_cuda else (0, 0),
        dtype=q_BHSD.dtype,
        heads=q_BHSD.shape[1],
        kv_heads=k_BGTD.shape[1],
        head_dim=q_BHSD.shape[-1],
        seq_q=q_BHSD.shape[2],
        seq_k=k_BGTD.shape[2],
        causal=causal,
        masked=mask is not None,
        window=window,
    )


def check(
    q_BHSD: torch.Tensor,
    k_BGTD: torch.Tensor,
    v_BGTD: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    window: int,
) -> None:
    """Raise ValueError, with both numbers and the rule, for what no kernel can mean."""
    q, k, v = q_BHSD, k_BGTD, v_BGTD
    _check_shapes(q, k, v)
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"q, k, v have dtypes {q.dtype}, {k.dtype}, {v.dtype}; one is needed outside autocast"
        )
    if not q.is_floating_point():
        raise ValueError(f"q, k, v are floating point; got {q.dtype}")
    if causal and q.shape[2] != k.shape[2]:
        raise ValueError(f"causal needs as many queries as keys; got {q.shape[2]} and {k.shape[2]}")
    if window < 0 or (window and not causal):
        raise ValueError(f"window is {window}, causal {causal}: a window is positive, and looks back only")
    if mask is not None:
        _check_mask(mask, (*q.shape[:3], k.shape[2]))


def _check_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError(f"q, k, v are [B, H, S, D]; got {q.dim()}, {k.dim()} and {v.dim()} dimensions")
    if k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: B and D are one, k and v alike"
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads are no multiple of {k.shape[1]} key/value heads")


def _check_mask(mask: torch.Tensor, scores: tuple[int, ...]) -> None:
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(f"attn_mask is bool (True: may look) or added to the scores; got {mask.dtype}")
    fits = len(mask.shape) <= 4 and all(
        have in (1, want) for have, want in zip(mask.shape[::-1], scores[::-1], strict=False)
    )
    if not fits:
        raise ValueError(f"attn_mask {tuple(mask.shape)} does not broadcast to [B, H, S, T] = {scores}")


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """Float32, as every fused kernel keeps it; float64 stays float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32
