"""What a CPU allocated while some code ran, the insides of custom ops included: the profiler sees the allocator."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from torch.profiler import ProfilerActivity, profile


@dataclass
class Allocations:
    """Filled in when the block ends."""

    largest_bytes: int = 0
    peak_bytes: int = 0  # above what was there when the block began


@contextlib.contextmanager
def allocations() -> Iterator[Allocations]:
    seen = Allocations()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield seen
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    sizes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    seen.largest_bytes = max(sizes, default=0)
    seen.peak_bytes = max(itertools.accumulate(sizes), default=0)
