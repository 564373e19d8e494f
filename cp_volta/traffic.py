"""How many bytes a rank sends, by arithmetic alone. What `cp_volta.comm` counts has to equal this.

Symbols: B batch, s tokens of a rank, D head dim, H query heads, G key/value heads, e bytes of an element, R ranks
of a ring, U of a Ulysses group. A forward that is recomputed (activation checkpoints) sends its bytes again.
"""

from __future__ import annotations

from dataclasses import dataclass

from cp_volta.heads import Heads


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes that one rank sends for one attention layer."""

    forward: int
    backward: int


def ulysses(*, batch: int, shard: int, dim: int, itemsize: int, heads: Heads, rank: int) -> Traffic:
    """Two all-to-alls a pass: q, k, v there and the output back; the backward is their mirror.

    With heads that divide evenly: e B s D (2H + 2G') (U-1)/U, G' = max(G, U).
    """
    others = [p for p in range(heads.ranks) if p != rank]
    rows = sum(heads.rows(p) for p in others) + len(others) * heads.query_heads(rank)
    sent = itemsize * batch * shard * dim * rows
    # Each pair of ranks swaps the two counts, so what a rank receives forward it sends backward.
    back = len(others) * heads.rows(rank) + sum(heads.query_heads(p) for p in others)
    return Traffic(forward=sent, backward=itemsize * batch * shard * dim * back)


def ring(
    *, batch: int, shard: int, dim: int, itemsize: int, kv_heads: int, ranks: int, accumulator: int = 4
) -> Traffic:
    """R-1 hops of K and V forward; backward the same, and R-1 hops of dK and dV in the accumulator's bytes."""
    elements = 2 * batch * shard * dim * kv_heads * (ranks - 1)
    return Traffic(forward=itemsize * elements, backward=(itemsize + accumulator) * elements)


def attention(
    *,
    batch: int,
    seq: int,
    dim: int,
    itemsize: int,
    query: int,
    kv: int,
    ring_ranks: int,
    ulysses_ranks: int,
    rank: int,
) -> Traffic:
    """One attention layer of any mode: what `rank` of ring_ranks * ulysses_ranks sends for a sequence of `seq`.

    Where a rank's query heads share key/value heads unevenly, the ring carries one key/value head per query head.
    Raises ValueError for heads that can't be dealt out.
    """
    heads, part = Heads(query, kv, ulysses_ranks), rank % ulysses_ranks
    carried = heads.kv_heads(part) if heads.index(part) is None else heads.query_heads(part)
    hops = ring(
        batch=batch, shard=seq // ring_ranks, dim=dim, itemsize=itemsize, kv_heads=carried, ranks=ring_ranks
    )
    deal = ulysses(
        batch=batch,
        shard=seq // (ring_ranks * ulysses_ranks),
        dim=dim,
        itemsize=itemsize,
        heads=heads,
        rank=part,
    )
    return Traffic(forward=hops.forward + deal.forward, backward=hops.backward + deal.backward)
