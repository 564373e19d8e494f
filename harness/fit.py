"""`python -m harness fit`: what there is to train with, the longest sequence by method, and a run that verifies it."""

from __future__ import annotations

from collections.abc import Sequence

import psutil
from rich.console import Console
from rich.text import Text

from harness import fingerprint
from harness.errors import HarnessError

_GIB = 1 << 30


def card_here() -> tuple[str, float]:
    """(name, GiB) of this machine's smallest card; ("", 0) without one."""
    found = fingerprint.cuda_devices()
    pairs = sorted(zip(found.get("memory_bytes", []), found.get("names", []), strict=True))
    return (pairs[0][1], pairs[0][0] / _GIB) if pairs else ("", 0.0)


def host_here_gib() -> float:
    """What the host can give now."""
    return float(psutil.virtual_memory().available) / _GIB


def budget(asked: float | None, here_gib: float) -> float:
    """GiB of one card. Raises HarnessError where neither is known."""
    if asked is None and not here_gib:
        raise HarnessError("fit: no card here to ask; give one card's memory: --budget 32")
    return asked if asked is not None else here_gib


def show(console: Console, answers: Sequence[tuple[str, object, str]], title: str) -> None:
    """One paragraph per method."""
    console.print(Text(title, "dim"), soft_wrap=True)
    for method, fits, text in answers:
        console.print(
            Text.assemble((f"{method}: ", "bold"), (text, "" if fits else "yellow")), soft_wrap=True
        )
