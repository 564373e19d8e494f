"""What the kernels of a run were lowered for, read from Triton's cache. Pure text; no torch, no Triton."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from probes.triton_lowering import assembly

# `ttg.target` in Triton's GPU IR is the card that its passes had in mind; `.target` in PTX is what is assembled for.
_LOWERED = re.compile(r'\bttg\.target\s*=\s*"cuda:(\d+)"')
_ASSEMBLED = re.compile(r"^\.target\s+(sm_\w+)", re.M)


class Lowered(msgspec.Struct, frozen=True, kw_only=True):
    """All kernels of a cache together."""

    count: int = 0
    targets: tuple[str, ...] = ()  # compute capabilities, "70"
    assembled: tuple[str, ...] = ()  # "sm_90a"
    with_dots: int = 0
    matrix: int = 0  # matrix instructions, in all
    fma: int = 0


def lowered(caches: Sequence[Path]) -> Lowered:
    """Every kernel in these folders, each once."""
    found = {path.resolve() for cache in caches for path in cache.rglob("*.ttgir")}
    targets: set[str] = set()
    assembled: set[str] = set()
    made = []
    for path in sorted(found):
        targets.update(_LOWERED.findall(path.read_text(errors="replace")) or ["unknown"])
        ptx = _text(path.with_suffix(".ptx"))
        assembled.update(_ASSEMBLED.findall(ptx))
        made.append(assembly.made(_text(path.with_suffix(".ttir")), ptx))
    return Lowered(
        count=len(found),
        targets=tuple(sorted(targets)),
        assembled=tuple(sorted(assembled)),
        with_dots=sum(bool(one.dots) for one in made),
        matrix=sum(sum(one.matrix.values()) for one in made),
        fma=sum(one.fma for one in made),
    )


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.is_file() else ""
