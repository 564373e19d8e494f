"""What lived when a step's memory was at its peak: arithmetic on a list of allocations. No torch."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Event:
    """One allocation, or one release (negative bytes) of what was allocated at `address`, in order of time."""

    address: int
    bytes: int
    where: str = ""  # the operator or the line that asked for it


@dataclass(frozen=True, kw_only=True)
class Block:
    """Memory that lived at the peak."""

    bytes: int
    kind: str  # saved, gradient, logits, temporary
    name: str  # whose, with shape and dtype where they are known


@dataclass(frozen=True, kw_only=True)
class Peak:
    """bytes: above what was held before the step began. live: positions in the list of events."""

    bytes: int
    live: tuple[int, ...]


def peak_of(events: Sequence[Event]) -> Peak:
    """The highest sum, and the allocations that made it up.

    Releases of memory that was allocated before the first event are left out: they belong to what was held before.
    """
    live: dict[int, int] = {}
    total = highest = 0
    at_peak: tuple[int, ...] = ()
    for position, event in enumerate(events):
        if event.bytes > 0:
            live[event.address] = position
            total += event.bytes
        elif (ended := live.pop(event.address, None)) is not None:
            total -= events[ended].bytes
        if total > highest:
            highest, at_peak = total, tuple(live.values())
    return Peak(bytes=highest, live=at_peak)


def last_at(events: Sequence[Event]) -> dict[int, int]:
    """Address -> position of its last allocation: an address serves again after a release."""
    return {event.address: position for position, event in enumerate(events) if event.bytes > 0}


def by_kind(blocks: Iterable[Block]) -> dict[str, int]:
    """Bytes of each kind."""
    sums: dict[str, int] = collections.defaultdict(int)
    for block in blocks:
        sums[block.kind] += block.bytes
    return dict(sums)


def extra(candidate: Sequence[Block], base: Sequence[Block]) -> list[Block]:
    """Blocks of the candidate that have no counterpart of the same kind and size in the base, largest first."""
    left = collections.Counter((block.kind, block.bytes) for block in base)
    found = []
    for block in candidate:
        if left[block.kind, block.bytes]:
            left[block.kind, block.bytes] -= 1
        else:
            found.append(block)
    return sorted(found, key=lambda block: -block.bytes)


def largest(blocks: Iterable[Block], count: int) -> list[str]:
    """The largest, equal ones together: "3 x 1.0 MiB saved: …"."""
    groups: dict[tuple[int, str, str], int] = collections.Counter(
        (block.bytes, block.kind, block.name) for block in blocks
    )
    ranked = sorted(groups.items(), key=lambda item: -item[0][0] * item[1])
    return [
        f"{f'{n} x ' if n > 1 else ''}{mib(size)} {kind}: {name}" for (size, kind, name), n in ranked[:count]
    ]


def mib(count: float) -> str:
    """Bytes, for a reader."""
    return f"{count / 2**20:.2f} MiB"
