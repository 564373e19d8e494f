"""Which tokens a rank holds, and which pairs of shards a causal ring has to compute.

A ring of P ranks deals a sequence out in one of two layouts:

    contiguous  rank r holds chunk r of P
    zigzag      rank r holds chunks r and 2P-1-r of 2P, in this order; a causal mask then gives every rank the same
                number of scores, where contiguous leaves the last rank with P/((P+1)/2) of the mean

Ulysses ranks split what their place in the ring holds into consecutive parts.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Layout = Literal["contiguous", "zigzag"]
LAYOUTS: tuple[Layout, ...] = ("contiguous", "zigzag")


class Block(NamedTuple):
    """Scores of one pair of shards: these of my queries against these of the source's keys."""

    queries: slice
    keys: slice
    causal: bool


def check_layout(layout: str) -> None:
    """Raise ValueError for a layout that is none."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout {layout!r} is none; there are {', '.join(LAYOUTS)}")


def divisor(ring: int, ulysses: int, layout: str) -> int:
    """What the sequence length has to be a multiple of."""
    check_layout(layout)
    return ring * ulysses * (2 if layout == "zigzag" and ring > 1 else 1)


def positions(seq: int, ring: int, rank: int, layout: str, *, ulysses: int = 1) -> Tensor:
    """The global positions, int64 [seq / (ring * ulysses)], of the tokens that `rank` of ring * ulysses holds.

    Ranks count the Ulysses dimension fastest. Raises ValueError where the sequence does not divide.
    """
    parts = divisor(ring, ulysses, layout)
    if seq <= 0 or seq % parts:
        raise ValueError(
            f"a sequence of {seq} tokens does not divide into {parts} parts (ring {ring} x ulysses {ulysses}, "
            f"{layout}); pad it to {-(-max(seq, 1) // parts) * parts}"
        )
    place, part = divmod(rank, ulysses)
    if layout == "contiguous" or ring == 1:
        held = torch.arange(seq).chunk(ring)[place]
    else:
        chunks = torch.arange(seq).chunk(2 * ring)
        held = torch.cat((chunks[place], chunks[2 * ring - 1 - place]))
    return held.chunk(ulysses)[part]


def block(rank: int, source: int, shard: int, *, causal: bool, layout: str) -> Block | None:
    """What rank computes against the keys of source, shards of `shard` tokens; None where all is in the future."""
    whole, half = slice(0, shard), shard // 2
    if not causal or rank == source:
        return Block(whole, whole, causal)
    if layout == "contiguous":
        return Block(whole, whole, False) if source < rank else None
    if source < rank:  # its late chunk lies after both of mine
        return Block(whole, slice(0, half), False)
    return Block(slice(half, shard), whole, False)  # my early chunk lies before both of its


def score_area(rank: int, ring: int, shard: int, *, causal: bool, layout: str) -> int:
    """Scores per head that the rank computes over the whole ring; the measure of balance."""
    area = 0
    for source in range(ring):
        part = block(rank, source, shard, causal=causal, layout=layout)
        if part is not None:
            rows, columns = part.queries.stop - part.queries.start, part.keys.stop - part.keys.start
            area += rows * (rows + 1) // 2 if part.causal else rows * columns
    return area
