"""A group: the points that one table and one plot show together, and how a point is called among them.

Generic over probes: axes are a plain mapping. Axes that change what is trained split the tables; the number of ranks,
or else `seq`, is the x axis; the other axes that vary make up the mode.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec

from harness.rows import Fact
from reports.load import Run
from reports.points import RUN, Point, Ranks, points
from reports.text import NONE, fact, ratio

K = TypeVar("K", bound=Hashable)
X = "seq"
RANKS = "cp_size"
_SMALL = 3  # points that are fewer than this make no table of their own
SPLIT = ("model", "dtype", "precision", "step", "optimizer", "batch")
_PLAIN = ("attention", "mode", "model", "dtype", "fault", "step")  # values that need no axis name beside them
_BASELINES: dict[str, tuple[Fact, ...]] = {"attention": ("math", "eager"), "compile": ("none",)}


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """Points of one probe on one device, sorted by mode and then x."""

    probe: str
    device: str
    device_name: str
    fixed: dict[str, Fact]  # axes with one value here
    x: str  # "cp_size" where it varies, else "seq" where that does, else ""
    mode_axes: tuple[str, ...]
    points: tuple[Point, ...]
    baseline: dict[str, Fact]  # mode axes of the points that ratios refer to

    @property
    def head(self) -> str:
        """The column over `label`."""
        return self.mode_axes[0] if len(self.mode_axes) == 1 else "mode"

    @property
    def timed(self) -> bool:
        """True where any process gave a time; a diagnostic probe's cells give only verdicts."""
        return any(row.step_s or row.tokens_per_step for point in self.points for row in point.rows)

    def label(self, point: Point) -> str:
        """The point's mode, e.g. `flash + compile layers`."""
        return label({axis: point.axes.get(axis) for axis in self.mode_axes})

    def modes(self) -> dict[str, list[Point]]:
        """Points by mode, in order; skipped ones left out."""
        found: dict[str, list[Point]] = {}
        for point in self.points:
            if point.status != "skipped":
                found.setdefault(self.label(point), []).append(point)
        return found

    def against(self, point: Point) -> Point | None:
        """The baseline at this point's other axes; None where no such cell is in the rows."""
        wanted = {**point.axes, **self.baseline}
        return next((p for p in self.points if dict(p.axes) == wanted), None)

    def relative(self, point: Point, value: str, smaller: bool = False) -> str:
        """`value` (a field of Point) against the baseline's, or why there is no ratio.

        smaller: less is better, and the ratio still is candidate / baseline.
        """
        base, mine = self.against(point), getattr(point, value)
        if point.status != "ok":
            return NONE
        if point.wrong and not smaller:
            return f"{NONE} (wrong result)"
        if base is None:
            return f"{NONE} (no baseline)"
        if base is point:
            return "baseline"
        if base.status != "ok":
            return f"{NONE} (baseline {base.status})"
        theirs = getattr(base, value)
        return ratio(mine / theirs) if mine and theirs else NONE


def label(axes: Mapping[str, Fact]) -> str:
    """A mode in words. Axes that are off are left out, unless all are."""
    on = {
        axis: value
        for axis, value in axes.items()
        if not (value is None or value is False or value == "none")
    }
    return " + ".join(_word(axis, value) for axis, value in (on or axes).items())


def _word(axis: str, value: Fact) -> str:
    if axis in _PLAIN:
        return fact(value)
    if isinstance(value, bool):
        return axis if value else f"no {axis}"
    return f"{axis} {fact(value)}"


def groups(runs: Sequence[Run]) -> tuple[Group, ...]:
    """All points, in groups. A group of one probe and device is split by what is trained.

    It is left whole where its parts would be too small to compare anything in.
    """
    rank = Ranks(runs)
    wanted = [run.meta["baseline"] for run in runs if isinstance(run.meta.get("baseline"), dict)]
    found: list[Group] = []
    for (probe, device, name), some in _by(
        points(runs), lambda p: (p.probe, p.device, p.device_name)
    ).items():
        found += [_group(probe, device, name, part, rank, wanted) for part in _parts(some, rank)]
    return tuple(found)


def _parts(some: list[Point], rank: Ranks) -> list[list[Point]]:
    split = tuple(axis for axis in varying(some) if axis in SPLIT)
    parts = list(_by(some, lambda point: tuple(point.axes.get(axis) for axis in split)).values())
    ran = [sum(point.status != "skipped" for point in part) for part in parts]
    if any(0 < n < _SMALL for n in ran):
        return [some]
    return sorted(parts, key=lambda part: rank.key(part[0].axes, split))


def _group(
    probe: str, device: str, name: str, some: list[Point], rank: Ranks, wanted: list[dict[str, Fact]]
) -> Group:
    vary = varying(some)
    x = next((axis for axis in (RANKS, X) if axis in vary), "")
    mode_axes = tuple(axis for axis in vary if axis != x)
    order = (*mode_axes, *([x] if x else []))
    return Group(
        probe=probe,
        device=device,
        device_name=name,
        fixed={axis: value for axis, value in some[0].axes.items() if axis not in vary},
        x=x,
        mode_axes=mode_axes,
        points=tuple(sorted(some, key=lambda p: rank.key(p.axes, order))),
        baseline=_baseline(some, mode_axes, x, rank, wanted),
    )


def _baseline(
    some: list[Point], mode_axes: tuple[str, ...], x: str, rank: Ranks, wanted: list[dict[str, Fact]]
) -> dict[str, Fact]:
    """run.json's baseline where this group has it; else math or eager, not compiled; else the first mode."""
    axes = [axis for axis in mode_axes if axis != RUN]
    for mapping in wanted:
        chosen = {axis: value for axis, value in mapping.items() if axis in (*axes, x)}
        if chosen and any(_has(point, chosen) for point in some):
            return chosen
    usual = {
        axis: value
        for axis, values in _BASELINES.items()
        for value in values
        if axis in axes and any(p.axes.get(axis) == value for p in some)
    }
    if usual and any(_has(point, usual) for point in some):
        return usual
    first = min(some, key=lambda p: rank.key(p.axes, axes))
    return {axis: first.axes.get(axis) for axis in axes}


def _has(point: Point, axes: Mapping[str, Fact]) -> bool:
    return all(point.axes.get(axis) == value for axis, value in axes.items())


def varying(some: Sequence[Point]) -> tuple[str, ...]:
    """The axes with more than one value here, in the probe's order."""
    names = dict.fromkeys(axis for point in some for axis in point.axes)
    return tuple(axis for axis in names if len({point.axes.get(axis) for point in some}) > 1)


def _by(some: Iterable[Point], key: Callable[[Point], K]) -> dict[K, list[Point]]:
    """Points by key, keys in order of first appearance."""
    found: dict[K, list[Point]] = {}
    for point in some:
        found.setdefault(key(point), []).append(point)
    return found
