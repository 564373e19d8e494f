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
    q_BHSD: torch.Tensor, k_BGTD: torch.Tensor, v_BGTD: torch.Tensor, causal: bool, window: int
) -> None:
    """Raise ValueError, with both numbers and the rule, for what no kernel can mean."""
    q, k, v = q_BHSD, k_BGTD, v_BGTD
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError(f"q, k, v are [B, H, S, D]; got {q.dim()}, {k.dim()} and {v.dim()} dimensions")
    if k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: B and D are one, k and v alike"
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads are no multiple of {k.shape[1]} key/value heads")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"q, k, v have dtypes {q.dtype}, {k.dtype}, {v.dtype}; one is needed outside autocast"
        )
    if causal and q.shape[2] != k.shape[2]:
        raise ValueError(f"causal needs as many queries as keys; got {q.shape[2]} and {k.shape[2]}")
    if window < 0 or (window and not causal):
        raise ValueError(f"window is {window}, causal {causal}: a window is positive, and looks back only")


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """Float32, as every fused kernel keeps it; float64 stays float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


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


def expand(kv_BGTD: torch.Tensor, heads: int) -> torch.Tensor:
    """[B, G, T, D] -> [B, H, T, D]: each key/value head for each query head of its group."""
    if kv_BGTD.shape[1] == heads:
        return kv_BGTD
    return kv_BGTD.repeat_interleave(heads // kv_BGTD.shape[1], dim=1)


def reduce(grad_BHTD: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[B, H, T, D] -> [B, G, T, D]: the gradient of `expand`, summed in float32."""
    B, H, T, D = grad_BHTD.shape
    if kv_heads == H:
        return grad_BHTD
    wide = torch.float64 if grad_BHTD.dtype == torch.float64 else torch.float32
    return grad_BHTD.view(B, kv_heads, H // kv_heads, T, D).sum(2, dtype=wide).to(grad_BHTD.dtype)


def as_bshd(x_BHSD: torch.Tensor) -> torch.Tensor:
    """The same values, in memory as [B, S, H, D]: one layout for every kernel, known when tracing."""
    return x_BHSD.transpose(1, 2).contiguous().transpose(1, 2)
