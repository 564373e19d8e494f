"""Why a number may not be what it looks like: the reason, and what to do about it.

Each check is one function in `_CHECKS`; a new doubt is one more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

import msgspec

from harness import stats
from harness.rows import Row
from reports.points import Point
from reports.text import count, one_line, percent

About = Literal["speed", "memory", "first", "mfu", "kernel", "check"]

SPREAD = 0.05  # between processes: (max - min) / median
UNSTEADY = 0.10  # inside a process: interquartile range / median
DRIFT = 0.05  # last third of the steps against the first
FEWEST = 4  # samples, below which a quartile means nothing


class Doubt(msgspec.Struct, frozen=True):
    """One reservation about one number."""

    about: About
    tag: str  # a word or two for the notes column
    text: str  # the reason; what to do


def doubts(point: Point) -> tuple[Doubt, ...]:
    """Everything a reader must know before believing the point's numbers. Empty for failed points."""
    if point.status != "ok":
        return ()
    return tuple(dict.fromkeys(doubt for check in _CHECKS for doubt in check(point)))


def _verdict(point: Point) -> Iterator[Doubt]:
    reason = one_line(point.verdict_reason)
    if point.wrong:
        text = f"the result is wrong ({point.verdict}): {reason}. Its speed counts for nothing"
        yield Doubt("speed", "WRONG RESULT", text)
    elif point.verdict == "no_reference":
        text = f"not checked against a reference: {reason}. Right or wrong is unknown"
        yield Doubt("check", "unchecked", text)
    elif point.verdict == "caveat":
        yield Doubt("check", "caveat", f"right with a caveat: {reason}")
    elif point.verdict is None:
        yield Doubt("check", "unchecked", "no check was made; measure.check = true compares with a reference")


def _samples(point: Point) -> Iterator[Doubt]:
    for row in point.ok:
        bad = len(row.step_s) - len(stats.finite(row.step_s))
        if bad:
            why = point.why_null("step_s") or "null"
            yield Doubt("speed", "lost samples", f"{bad} of {len(row.step_s)} step times are n/a ({why})")
    fewest = min((len(stats.finite(row.step_s)) for row in point.ok), default=0)
    if fewest == 0:
        yield Doubt("speed", "no samples", "a process gave no step times; see its row's reason and log")
    elif fewest < FEWEST:
        had = count(fewest, "timed step")
        yield Doubt(
            "speed", "few samples", f"only {had} in a process; raise measure.steps to {FEWEST} or more"
        )


def _noise(point: Point) -> Iterator[Doubt]:
    if point.spread is not None and point.spread > SPREAD:
        text = f"the processes differ by {percent(point.spread)}; keep other work off the machine, or raise replicates"
        yield Doubt("speed", "spread", text)
    iqr = max((s for r in point.ok if (s := stats.relative_iqr(stats.finite(r.step_s)))), default=0.0)
    if iqr > UNSTEADY:
        text = (
            f"unsteady steps: their interquartile range is {percent(iqr)} of the median; raise measure.steps"
        )
        yield Doubt("speed", "unsteady", text)
    drifts = [d for r in point.ok if (d := stats.drift(stats.finite(r.step_s)))]
    worst = max(drifts, key=abs, default=0.0)
    if abs(worst) > DRIFT:
        way = "slower" if worst > 0 else "faster"
        cure = "heat or a growing cache?" if worst > 0 else "raise measure.warmup_steps"
        text = f"step times drift: the last third is {percent(abs(worst))} {way} than the first; {cure}"
        yield Doubt("speed", "drift", text)


def _machine(point: Point) -> Iterator[Doubt]:
    states = [s for row in point.ok for s in (row.device_before, row.device_after) if s]
    throttled = sorted({reason for s in states for reason in s.throttle_reasons if "idle" not in reason})
    if throttled:
        text = f"the GPU was held back ({', '.join(throttled)}); check cooling and power limit, then measure again"
        yield Doubt("speed", "throttled", one_line(text))
    foreign = sorted({other for s in states for other in s.foreign_processes})
    if foreign:
        text = f"others used the same GPU ({'; '.join(foreign)}); measure again when it is free"
        yield Doubt("speed", "shared GPU", one_line(text))
    if any(row.isolation.neighbours for row in point.ok):
        yield Doubt("speed", "neighbours", "other cells ran at the same time; run without --jobs to be alone")


def _compiler(point: Point) -> Iterator[Doubt]:
    for report in (row.compile for row in point.ok if row.compile):
        if report.fallbacks:
            first = one_line(report.fallbacks[0], 160)
            text = f"{count(len(report.fallbacks), 'graph')} ran eagerly after all: {first}"
            yield Doubt("speed", "fell back", f"{text}. What was asked is not what ran")
        if report.graph_breaks:
            where = report.graph_breaks[0]
            text = f"{count(len(report.graph_breaks), 'graph break')}: {one_line(where.reason, 160)}"
            yield Doubt("speed", "graph breaks", f"{text} ({where.where})" if where.where else text)
        if report.recompiles:
            first = one_line(report.recompiles[0], 160)
            yield Doubt("speed", "recompiled", f"{count(len(report.recompiles), 'recompile')}: {first}")


def _attention(point: Point) -> Iterator[Doubt]:
    for report in (row.attention for row in point.ok if row.attention):
        if not report.honoured:
            text = f"attention {report.asked} was asked for, {report.ran} ran ({report.source or 'no source given'})"
            yield Doubt("kernel", "other kernel", text)


def _nulls(point: Point) -> Iterator[Doubt]:
    for row in point.ok:
        lost = {
            path.partition("[")[0]: why for path, why in row.nulls.items() if not path.startswith("step_s")
        }
        for field, why in lost.items():
            yield Doubt("check", f"{field} n/a", f"{field} is n/a ({one_line(why)})")


def _replicates(point: Point) -> Iterator[Doubt]:
    bad: list[Row] = [row for row in point.rows if row.status != "ok"]
    if bad:
        text = f"{len(bad)} of {len(point.rows)} processes did not end well ({bad[0].status}: {one_line(bad[0].reason, 120)})"
        yield Doubt("speed", "partly failed", text)
    if len({row.environment for row in point.ok}) > 1:
        text = "its processes ran in different environments; run again with --fresh"
        yield Doubt("speed", "mixed", text)


def _peak_speed(point: Point) -> Iterator[Doubt]:
    if point.mfu is not None and point.mfu > 1:
        source = one_line(point.ok[0].peak_source or "no source given")
        text = f"above 100 % is implausible: the FLOP count or the peak ({source}) is wrong"
        yield Doubt("mfu", "implausible MFU", text)


def _said_by_the_probe(point: Point) -> Iterator[Doubt]:
    for note in dict.fromkeys(note for row in point.ok for note in row.notes):
        yield Doubt("speed", "note", one_line(note))


_CHECKS: tuple[Callable[[Point], Iterator[Doubt]], ...] = (
    _verdict,
    _samples,
    _noise,
    _machine,
    _compiler,
    _attention,
    _nulls,
    _replicates,
    _peak_speed,
    _said_by_the_probe,
)
