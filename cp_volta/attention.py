"""Attention over a sequence that the ranks of a group share. Knows nothing of transformers.

Every rank gives its tokens' q, k, v and gets its tokens' output. Ulysses deals the heads out and gathers the
sequence; the ring keeps the heads and lets keys go round; both together are the hybrid. One path serves all three.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

import cp_volta.ring  # noqa: F401  its op
from cp_volta.comm import all_to_all, check_device
from cp_volta.group import CpGroup
from cp_volta.heads import Heads
from tc_volta.autocast import as_autocast
from tc_volta.errors import Unsupported
from tc_volta.request import check


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cp: CpGroup,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    documents: Tensor | None = None,
    kernel: str = "auto",
) -> Tensor:
    """Exact attention of this rank's queries to the whole sequence's keys; differentiable, one graph under compile.

    q [B, H, s, D]; k, v [B, G, s, D], H a multiple of G: the tokens of `cp.positions`. Returns [B, H, s, D].
    window: keys a query sees, itself included (needs causal). documents [B, S] int, the same on every rank: the
    document of each token of the whole sequence in its order; no token sees another document's.
    kernel: of tc_volta's table. Masks of windows and documents are built per block of the ring, [s, s] each.
    Autocast: q, k, v are cast to its dtype, and travel so.
    Raises ValueError, or Unsupported, on every rank alike and before anything is sent.
    """
    q, k, v = as_autocast(q, k, v)
    _check(q, k, v, cp, causal, window or 0, documents)
    heads = Heads(q.shape[1], k.shape[1], cp.ulysses)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if cp.ulysses > 1:
        q, k, v = _scatter_heads(q, k, v, heads, cp)
    out, _ = torch.ops.cp_volta.ring_attention(
        q, k, v, documents, causal, scale, window or 0, cp.layout, kernel, cp.ring_group.group_name
    )
    return _gather_heads(out, heads, cp) if cp.ulysses > 1 else cast(Tensor, out)


def _check(
    q: Tensor, k: Tensor, v: Tensor, cp: CpGroup, causal: bool, window: int, documents: Tensor | None
) -> None:
    check(q, k, v, None, causal, window)
    check_device(q, cp.group)
    shard, parts = q.shape[2], cp.divisor // cp.size
    if k.shape[2] != shard or shard == 0 or shard % parts:
        raise ValueError(
            f"a rank's queries and keys are the same tokens, a multiple of {parts} of them ({cp.layout}); "
            f"got {shard} and {k.shape[2]}"
        )
    if documents is not None and tuple(documents.shape) != (q.shape[0], shard * cp.size):
        raise ValueError(
            f"documents is [B, S] = [{q.shape[0]}, {shard * cp.size}], of the whole sequence; "
            f"got {list(documents.shape)}"
        )


def _scatter_heads(
    q: Tensor, k: Tensor, v: Tensor, heads: Heads, cp: CpGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """All heads of my tokens -> my heads of all tokens, in one exchange: [B, H, s, D] -> [B, h, U s, D]."""
    rank, size = cp.ulysses_group.rank(), cp.ulysses
    parts = [x[:, run] for p in range(size) for x, run in zip((q, k, v), _runs(heads, p), strict=True)]
    rows = torch.cat([part.transpose(0, 1) for part in parts])
    give, take = [heads.rows(p) for p in range(size)], [heads.rows(rank)] * size
    got = all_to_all(rows, give, take, cp.ulysses_group)
    whole = got.unflatten(0, (size, -1)).permute(2, 1, 0, 3, 4).flatten(2, 3)  # [B, rows, U s, D]
    n, g = heads.query_heads(rank), heads.kv_heads(rank)
    q, k, v = whole.split((n, g, g), dim=1)
    index = heads.index(rank)
    if index is not None:
        k, v = k[:, index], v[:, index]
    return q, k, v


def _runs(heads: Heads, rank: int) -> tuple[slice, slice, slice]:
    return heads.queries(rank), heads.keys(rank), heads.keys(rank)


def _gather_heads(out: Tensor, heads: Heads, cp: CpGroup) -> Tensor:
    """My heads of all tokens -> all heads of my tokens: [B, h, U s, D] -> [B, H, s, D]."""
    rank, size = cp.ulysses_group.rank(), cp.ulysses
    rows = out.unflatten(2, (size, -1)).permute(2, 1, 0, 3, 4).flatten(0, 1)  # [U h, B, s, D]
    give, take = [heads.query_heads(rank)] * size, [heads.query_heads(p) for p in range(size)]
    return all_to_all(rows, give, take, cp.ulysses_group).transpose(0, 1)


class _Attention(nn.Module):
    """`attend` as a module, on a group that has to be of its kind."""

    def __init__(
        self, cp: CpGroup, *, causal: bool = True, kernel: str = "auto", dropout: float = 0.0
    ) -> None:
        super().__init__()
        if dropout:
            raise Unsupported(f"dropout is {dropout}; attention over several ranks offers none")
        self.cp, self.causal, self.kernel = cp, causal, kernel

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        window: int | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """As `attend`."""
        return attend(
            q,
            k,
            v,
            self.cp,
            causal=self.causal,
            scale=scale,
            window=window,
            documents=documents,
            kernel=self.kernel,
        )


class UlyssesAttention(_Attention):
    """Heads dealt out over all ranks of the group: cp = init_cp_group(n, ulysses=n)."""

    def __init__(
        self, cp: CpGroup, *, causal: bool = True, kernel: str = "auto", dropout: float = 0.0
    ) -> None:
        super().__init__(cp, causal=causal, kernel=kernel, dropout=dropout)
        if cp.ring > 1:
            raise ValueError(
                f"the group has a ring of {cp.ring}: init_cp_group({cp.size}, ulysses={cp.size})"
            )


class RingAttention(_Attention):
    """Keys and values go round; heads stay: cp = init_cp_group(n). A group with both dimensions is the hybrid."""
