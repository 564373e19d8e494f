"""A point: all processes of one cell, with what is derived from their raw samples.

Everything a table, a plot or an answer says about a cell is read here, so that they cannot disagree.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from harness import stats
from harness.rows import Fact, Row, Status, Verdict
from reports.load import Run

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

RUN = "run"  # the axis that tells runs apart, where several are shown together
_SEVERITY: tuple[Verdict, ...] = ("ok", "caveat", "no_reference", "mismatch", "nonfinite")
WRONG: tuple[Verdict, ...] = ("mismatch", "nonfinite")


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One cell of one run; statistics over its processes."""

    run: str
    probe: str
    device: str  # cpu, cuda
    device_name: str
    axes: Mapping[str, Fact]
    rows: tuple[Row, ...]  # by replicate
    status: Status  # ok if any process was
    reason: str = ""
    verdict: Verdict | None = None  # the worst of the processes' verdicts; None: not checked
    verdict_reason: str = ""
    medians_s: tuple[float, ...] = ()  # one per process that has samples
    step_s: float | None = None  # median of these
    spread: float | None = None  # (max - min) / median of these; None below two processes
    tokens_per_s: float | None = None
    peak_bytes: int | None = None  # the largest of the processes: allocator (CUDA), resident set (CPU)
    first_step_s: float | None = None
    mfu: float | None = None

    @property
    def ok(self) -> tuple[Row, ...]:
        """The processes that ended well."""
        return tuple(row for row in self.rows if row.status == "ok")

    @property
    def wrong(self) -> bool:
        """True where the result is known to be wrong, whatever its speed."""
        return self.verdict in WRONG

    @property
    def kernel(self) -> str:
        """The attention kernels that ran, from the profiler; "" where nothing is known."""
        return ", ".join(dict.fromkeys(row.attention.ran for row in self.ok if row.attention))

    def why_null(self, path: str) -> str:
        """`NaN` where the first null under this field path is one; "" where nothing is null there."""
        found = [why for row in self.ok for at, why in row.nulls.items() if at.startswith(path)]
        return found[0] if found else ""


def labels(runs: Sequence[Run]) -> tuple[str, ...]:
    """One name per run, told apart by when each began, or by position. Does not depend on folders."""
    names = [run.name for run in runs]
    for kept in (10, 16):  # the day; the minute
        if len(set(names)) < len(names):
            starts = (str(run.meta.get("started_at", ""))[:kept].replace("T", " ") for run in runs)
            names = [start or run.name for run, start in zip(runs, starts, strict=True)]
    if len(set(names)) < len(names):
        names = [f"{name} #{i}" for i, name in enumerate(names, 1)]
    return tuple(names)


def points(runs: Sequence[Run]) -> tuple[Point, ...]:
    """Every cell of every run, in the suite's order. With several runs, `run` is the last axis."""
    found = []
    for label, run in zip(labels(runs), runs, strict=True):
        cells: dict[tuple[str, str], list[Row]] = {}
        for row in run.rows:
            cells.setdefault((row.probe, row.cell), []).append(row)
        extra: dict[str, Fact] = {RUN: label} if len(runs) > 1 else {}
        found += [_point(run, label, extra, rows) for rows in cells.values()]
    rank = Ranks(runs)
    return tuple(sorted(found, key=lambda p: (p.probe, rank.key(p.axes, tuple(p.axes)))))


def _point(run: Run, label: str, extra: dict[str, Fact], rows: list[Row]) -> Point:
    rows = sorted(rows, key=lambda row: row.replicate)
    ok = [row for row in rows if row.status == "ok"]
    shown = ok[0] if ok else rows[0]
    medians = [m for row in ok if (m := stats.median(stats.finite(row.step_s))) is not None]
    step_s = stats.median(medians)
    verdict, reason = worst_verdict(ok)
    return Point(
        run=label,
        probe=shown.probe,
        device=shown.device,
        device_name=device_name(run.meta, shown.environment) or shown.device,
        axes={**shown.axes, **extra},
        rows=tuple(rows),
        status=shown.status,
        reason=shown.reason,
        verdict=verdict,
        verdict_reason=reason,
        medians_s=tuple(medians),
        step_s=step_s,
        spread=stats.relative_range(medians),
        tokens_per_s=shown.tokens_per_step / step_s if shown.tokens_per_step and step_s else None,
        peak_bytes=max((p for row in ok if (p := peak_bytes(row)) is not None), default=None),
        first_step_s=stats.median(stats.finite(row.first_step_s for row in ok)),
        mfu=_mfu(shown, step_s),
    )


def peak_bytes(row: Row) -> int | None:
    """Peak of the steady steps: the device's allocator; on a CPU the process's resident set."""
    peak = row.memory.allocated_peak_bytes
    return row.memory.host_peak_bytes if peak is None and row.device == "cpu" else peak


def _mfu(row: Row, step_s: float | None) -> float | None:
    if not (step_s and row.flops_per_step and row.peak_flops_per_s):
        return None
    return row.flops_per_step / step_s / row.peak_flops_per_s


def worst_verdict(rows: Iterable[Row]) -> tuple[Verdict | None, str]:
    """The worst verdict of these rows, parity's and the probe's own, with its reason."""
    said: list[tuple[Verdict, str]] = []
    for row in rows:
        if row.verdict is not None:
            said.append((row.verdict, row.verdict_reason))
        if row.parity is not None:
            said.append((row.parity.verdict, row.parity.reason))
    return max(said, key=lambda pair: _SEVERITY.index(pair[0]), default=(None, ""))


def device_name(meta: Mapping[str, Any], environment: str) -> str:
    """The device's name, from run.json: of several equal cards, one."""
    device = meta.get("environments", {}).get(environment, {}).get("device", {})
    names = device.get("names") or [device.get("name", "")]
    return ", ".join(dict.fromkeys(str(name) for name in names if name))


class Ranks:
    """The order of axis values: as the suite lists them, else baselines first, then by number or name."""

    _FIRST = ("math", "eager", "none", "default")

    def __init__(self, runs: Sequence[Run]) -> None:
        self._listed: dict[str, list[Fact]] = {RUN: list(labels(runs))}
        for run in runs:
            for axis, values in _suite_axes(run).items():
                known = self._listed.setdefault(axis, [])
                known += [value for value in values if value not in known]

    def key(self, axes: Mapping[str, Fact], names: Sequence[str]) -> tuple[tuple[int, float, str], ...]:
        """Sorts mappings of axes by these names."""
        return tuple(self.value(name, axes.get(name)) for name in names)

    def value(self, axis: str, value: Fact) -> tuple[int, float, str]:
        """Sorts values of one axis."""
        listed = self._listed.get(axis, [])
        if isinstance(value, int | float) and not isinstance(value, bool):
            return (1, float(value), "")
        if value in listed:
            return (0, listed.index(value), "")
        text = str(value)
        first = self._FIRST.index(text) if text in self._FIRST else len(self._FIRST)
        number = re.search(r"\d+", text)
        return (2, first, f"{number[0]:>12}{text}" if number and first == len(self._FIRST) else text)


def _suite_axes(run: Run) -> dict[str, list[Fact]]:
    try:
        suite = tomllib.loads(str(run.meta.get("suite_toml", "")))
    except tomllib.TOMLDecodeError:
        return {}  # the order of rows is a courtesy; run.json may be from elsewhere
    axes = suite.get("axes", {})
    return {name: values for name, values in axes.items() if isinstance(values, list)}
