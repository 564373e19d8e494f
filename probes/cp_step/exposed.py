"""How long a GPU spends in collectives, and how much of that nothing else ran beside: the price that is left to hide."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.profiler import ProfilerActivity, profile

Span = tuple[float, float]  # start and end, microseconds


def collectives(step: Callable[[], object]) -> dict[str, float]:
    """Of one profiled step on this rank's GPU: seconds in NCCL's kernels, and those that no other kernel covers."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    spans: dict[bool, list[Span]] = {True: [], False: []}
    for event in seen.events() or ():
        if event.device_type.name == "CUDA":
            spans["nccl" in event.name.lower()].append((event.time_range.start, event.time_range.end))
    inside = merged(spans[True])
    return {
        "collective_s": _length(inside) / 1e6,
        "collective_exposed_s": uncovered(inside, merged(spans[False])) / 1e6,
    }


def merged(spans: Iterable[Span]) -> list[Span]:
    """The same time, in order and without overlaps."""
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def uncovered(spans: list[Span], covers: list[Span]) -> float:
    """How much of `spans` lies in none of `covers`; both merged."""
    covered = sum(
        max(0.0, min(end, cover_end) - max(start, cover_start))
        for start, end in spans
        for cover_start, cover_end in covers
    )
    return _length(spans) - covered


def _length(spans: list[Span]) -> float:
    return sum(end - start for start, end in spans)
