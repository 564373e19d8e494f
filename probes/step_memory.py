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
        reset_host_peak()
    try:
        yield found
    finally:
        if device == "cuda":
            found[0] = torch.cuda.max_memory_allocated()
        else:
            found[0] = host_peak_bytes()


def reset_host_peak() -> None:
    """Let the resident set's peak begin anew, where the kernel lets us."""
    with contextlib.suppress(OSError):  # the peak then counts from the process's start
        Path("/proc/self/clear_refs").write_text("5")


def host_peak_bytes() -> int | None:
    """The resident set's peak of this process; None where the kernel does not tell."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return None


def held(device: str) -> int:
    """Bytes that are held now."""
    if device == "cuda":
        return torch.cuda.memory_allocated()
    return int(psutil.Process().memory_info().rss)


def wait(device: str) -> None:
    """Until the device has done what it was given."""
    if device == "cuda":
        torch.cuda.synchronize()
