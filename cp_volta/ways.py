"""The ways in which ranks can share a sequence, what each costs, and which to take. Arithmetic alone: no torch here.

Times are of one layer's attention, forward and backward, on the busiest rank:

    scores      4 B H D S (S + 1) / 2 operations forward and 2.5 times that backward, over the ranks, times the
                imbalance: (2R - 1) / R for contiguous shards on a ring of R, 1 for zigzag
    exchange    Ulysses' all-to-alls are waited for: bytes / link. A ring's hop travels while a block computes: only
                what is longer than the block is waited for
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cp_volta import traffic
from cp_volta.step import Shape

BACKWARD = 2.5  # operations of a flash backward to its forward's


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be shared: `batch` sequences of `seq` tokens over `ranks`, elements of `itemsize` bytes."""

    shape: Shape
    seq: int
    ranks: int
    batch: int = 1
    itemsize: int = 2
    recomputed: bool = True  # layers are checkpointed: their forward runs, and sends, twice


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way; `why_not` is "" where it can be taken."""

    ulysses: int
    ring: int
    layout: str
    why_not: str = ""
    forward_bytes: int = 0  # that the busiest rank sends for one layer
    backward_bytes: int = 0
    imbalance: float = 1.0  # busiest rank's scores / the mean

    @property
    def name(self) -> str:
        """ulysses, ring, ring-contiguous, hybrid UxR."""
        if self.ring == 1:
            return "ulysses"
        shards = "" if self.layout == "zigzag" else "-contiguous"
        return f"ring{shards}" if self.ulysses == 1 else f"hybrid{shards} {self.ulysses}x{self.ring}"


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Seconds of one layer's attention, forward and backward."""

    scores_s: float
    waiting_s: float

    @property
    def total_s(self) -> float:
        """Both."""
        return self.scores_s + self.waiting_s


def ways(job: Job) -> list[Way]:
    """Every way to share this job, those that can't be included, with the reason. One rank alone has none."""
    return list(_ways(job)) if job.ranks > 1 else []


def _ways(job: Job) -> Iterator[Way]:
    for ulysses in (u for u in range(job.ranks, 0, -1) if job.ranks % u == 0):
        ring = job.ranks // ulysses
        for layout in ("zigzag", "contiguous") if ring > 1 else ("contiguous",):
            yield _way(job, ulysses, ring, layout)


def _way(job: Job, ulysses: int, ring: int, layout: str) -> Way:
    heads, parts = job.shape.heads, job.ranks * (2 if layout == "zigzag" else 1)
    if heads < ulysses:
        why_not = f"{heads} query heads do not serve {ulysses} ranks"
    elif job.seq % parts:
        why_not = (
            f"{job.seq:,} tokens do not divide into {parts} parts; pad to {-(-job.seq // parts) * parts:,}"
        )
    else:
        each = [
            traffic.attention(
                batch=job.batch,
                seq=job.seq,
                dim=job.shape.head_dim,
                itemsize=job.itemsize,
                query=heads,
                kv=job.shape.kv_heads,
                ring_ranks=ring,
                ulysses_ranks=ulysses,
                rank=rank,
            )
            for rank in range(ulysses)  # places on the ring send alike
        ]
        dealt = -(-heads // ulysses) * ulysses / heads  # the most heads a rank takes / the mean
        return Way(
            ulysses=ulysses,
            ring=ring,
            layout=layout,
            forward_bytes=max(one.forward for one in each),
            backward_bytes=max(one.backward for one in each),
            imbalance=dealt * ((2 * ring - 1) / ring if layout == "contiguous" else 1.0),
        )
    return Way(ulysses=ulysses, ring=ring, layout=layout, why_not=why_not)


def cost(job: Job, way: Way, *, flops_per_s: float, link_bytes_per_s: float) -> Cost:
    """What a layer's attention costs that way, on devices and links of these rates. Raises ValueError if it can't be."""
    if way.why_not:
        raise ValueError(f"{way.name}: {way.why_not}")
    shape = job.shape
    once = 2 * job.batch * shape.heads * shape.head_dim * job.seq * (job.seq + 1) / job.ranks
    forward, backward = once / flops_per_s, BACKWARD * once / flops_per_s
    hops = _hops(job, way)
    exchange = [
        max(0, sent - hop * (way.ring - 1)) / link_bytes_per_s
        for sent, hop in zip(_sent(way), hops, strict=True)
    ]
    late = [
        (way.ring - 1) * max(0.0, hop / link_bytes_per_s - passed / way.ring)
        for hop, passed in zip(hops, (forward, backward), strict=True)
    ]
    passes = (2 if job.recomputed else 1, 1)
    scores = (passes[0] * forward + backward) * way.imbalance
    waiting = sum(n * (a + b) for n, a, b in zip(passes, exchange, late, strict=True))
    return Cost(scores_s=scores, waiting_s=waiting)


def _sent(way: Way) -> tuple[int, int]:
    return way.forward_bytes, way.backward_bytes


def _hops(job: Job, way: Way) -> tuple[float, float]:
    """Bytes of one hop of the ring, forward and backward."""
    if way.ring == 1:
        return 0.0, 0.0
    alone = traffic.ring(
        batch=job.batch,
        shard=job.seq // way.ring,
        dim=job.shape.head_dim,
        itemsize=job.itemsize,
        kv_heads=max(1, job.shape.kv_heads // way.ulysses),
        ranks=way.ring,
    )
    return alone.forward / (way.ring - 1), alone.backward / (way.ring - 1)


def prefer(
    job: Job, found: Sequence[Way], *, flops_per_s: float, link_bytes_per_s: float
) -> tuple[Way, str] | None:
    """The cheapest way that can be taken, and why; None where there is none."""
    open_ways = [way for way in found if not way.why_not]
    if not open_ways:
        return None
    costs = {
        way: cost(job, way, flops_per_s=flops_per_s, link_bytes_per_s=link_bytes_per_s) for way in open_ways
    }
    best, *others = sorted(open_ways, key=lambda way: costs[way].total_s)
    why = f"{_words(costs[best])} a layer"
    if others:
        why += f"; next is {others[0].name} with {_words(costs[others[0]])}"
    return best, why


def _words(found: Cost) -> str:
    return f"{found.total_s * 1e3:.2f} ms ({found.waiting_s * 1e3:.2f} of it waiting)"
