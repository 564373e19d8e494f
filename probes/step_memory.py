"""The peak of memory while something runs, and what is held now: the allocator's on CUDA, else the resident set."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch


@contextlib.contextmanager
def peak(device: str) -> Iterator[list[int | None]]:
    """A list of one: the peak in bytes of what runs inside, known at its end. On a CPU libraries are included."""
    found: list[int | None] = [None]
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        with contextlib.suppress(OSError):  # the peak then counts from the process's start
            Path("/proc/self/clear_refs").write_text("5")
    try:
        yield found
    finally:
        if device == "cuda":
            found[0] = torch.cuda.max_memory_allocated()
        else:
            with contextlib.suppress(OSError):
                lines = Path("/proc/self/status").read_text().splitlines()
                found[0] = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def held(device: str) -> int:
    """Bytes that are held now."""
    if device == "cuda":
        return torch.cuda.memory_allocated()
    return int(psutil.Process().memory_info().rss)


def wait(device: str) -> None:
    """Until the device has done what it was given."""
    if device == "cuda":
        torch.cuda.synchronize()
