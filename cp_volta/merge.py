"""Partial attention over blocks of keys, merged in float32 (float64 for float64)."""

from __future__ import annotations

import torch
from torch import Tensor


class Partial:
    """The running (out [B, H, S, D], lse [B, H, S]) of queries over the blocks of keys seen so far.

    Starts as "no key seen": out 0, lse -inf; such a query stays so, where the usual sigmoid form gives NaN.
    """

    def __init__(self, q: Tensor, dtype: torch.dtype) -> None:
        self.out = torch.zeros(q.shape, dtype=dtype, device=q.device)
        self.lse = torch.full(q.shape[:3], -torch.inf, dtype=dtype, device=q.device)

    def add(self, queries: slice, out: Tensor, lse: Tensor) -> None:
        """Merge a block's result for a part of the queries."""
        held = self.lse[:, :, queries]
        total = torch.logaddexp(held, lse)
        base = total.masked_fill(total == -torch.inf, 0.0)  # neither saw a key: exp(-inf - 0), no NaN
        mine, its = (held - base).exp().unsqueeze(-1), (lse - base).exp().unsqueeze(-1)
        self.out[:, :, queries] = self.out[:, :, queries] * mine + out.to(self.out.dtype) * its
        self.lse[:, :, queries] = total
