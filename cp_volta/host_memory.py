"""Host memory for checkpoints: pinned chunks, taken and given back, never more than a limit.

Chunks are a power of two long, since torch's allocator of pinned memory rounds each request up to one: 1.5 GiB in
one piece would pin 2. They are kept between steps; pinning is slow (about half a second a GiB).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

CHUNK_BYTES = 64 << 20


def available_bytes() -> int:
    """What this machine's host memory can still give, of the container's limit where that is smaller.

    Source: /proc/meminfo (MemAvailable) and control group v2 files; 0 where neither can be read.
    """
    found = [n for n in (_meminfo(), _cgroup()) if n is not None]
    return min(found, default=0)


def _meminfo() -> int | None:
    try:
        with open("/proc/meminfo") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def _cgroup() -> int | None:
    try:
        with open("/sys/fs/cgroup/memory.max") as limit, open("/sys/fs/cgroup/memory.current") as used:
            return int(limit.read()) - int(used.read())
    except (OSError, ValueError):  # "max" is no number: no limit
        return None


@dataclass
class HostMemory:
    """Chunks for one device's checkpoints. `limit_bytes` bounds all that was ever taken from the host at once."""

    limit_bytes: int
    pinned: bool
    chunk_bytes: int = CHUNK_BYTES
    taken_bytes: int = 0  # from the host; what is free again below included
    used_bytes: int = 0
    peak_bytes: int = 0
    free: list[Tensor] = field(default_factory=list)

    def take(self, needed: int) -> list[Tensor] | None:
        """Chunks of at least `needed` bytes together; None where the limit does not allow them."""
        count = -(-needed // self.chunk_bytes)
        missing = max(0, count - len(self.free)) * self.chunk_bytes
        if self.taken_bytes + missing > self.limit_bytes:
            return None
        while len(self.free) < count:
            self.free.append(torch.empty(self.chunk_bytes, dtype=torch.uint8, pin_memory=self.pinned))
            self.taken_bytes += self.chunk_bytes
        chunks = [self.free.pop() for _ in range(count)]
        self.used_bytes += count * self.chunk_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return chunks

    def give_back(self, chunks: list[Tensor]) -> None:
        """Chunks to be taken again."""
        self.free += chunks
        self.used_bytes -= len(chunks) * self.chunk_bytes

    def release(self) -> None:
        """Give the chunks that nobody uses back to the host."""
        self.taken_bytes -= len(self.free) * self.chunk_bytes
        self.free.clear()
