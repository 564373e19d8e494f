"""Shared-memory segments that a dead cell left in /dev/shm. A leaf."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_SHM = Path("/dev/shm")
# As Python's shared_memory and semaphores, torch's file-backed tensors, NCCL and PSM name them.
_NAMES = ("psm_", "sem.", "torch_", "nccl-", "cuda.shm.")


def segments() -> frozenset[str]:
    """Names of the segments there are, of the kinds a cell may leave."""
    try:
        return frozenset(name for name in os.listdir(_SHM) if name.startswith(_NAMES))
    except OSError:
        return frozenset()


def sweep(before: frozenset[str]) -> int:
    """Unlink segments that are not in `before` and that no process holds. Returns how many.

    A segment of another program that came in the meantime is held by that program, and stays.
    """
    new = segments() - before
    if not new:
        return 0
    free = new - _held(new)
    for name in free:
        with contextlib.suppress(OSError):
            (_SHM / name).unlink()
    return len(free)


def _held(names: frozenset[str]) -> set[str]:
    held: set[str] = set()
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            # gone meanwhile, or another user's: theirs are not ours to unlink anyway
            with contextlib.suppress(OSError):
                text = (process / "maps").read_text()
                held |= {name for name in names if f"{_SHM}/{name}" in text}
                links = {os.readlink(fd) for fd in (process / "fd").iterdir()}
                held |= {name for name in names if f"{_SHM}/{name}" in links}
    return held
