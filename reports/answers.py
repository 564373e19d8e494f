"""One sentence per question, each with its evidence and its reservations, from rows alone.

A winner is called only where the difference exceeds the measured spread, and only among right results.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from harness import stats
from harness.rows import Fact
from reports.doubts import doubts
from reports.groups import X, label, varying
from reports.load import Run
from reports.points import Point, points
from reports.text import count, fact, gib, one_line, percent, ratio, significant

SURE = 0.01  # two processes may agree by chance: no smaller difference is called, whatever the spread
SINGLE = 0.05  # the least difference that single processes are trusted with

_QUESTIONS = (
    ("attention", "Which attention kernel?", "attention kernel"),
    ("compile", "Which compile mode?", "compile mode"),
    ("dtype", "Which dtype?", "dtype"),
)
_LENGTH = "How long a sequence?"


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A question answered. `str(answer)` is one line of plain text."""

    question: str
    sentence: str
    evidence: tuple[str, ...] = ()
    reservations: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.question} {self.sentence}"


class _Contest(msgspec.Struct, frozen=True, kw_only=True):
    """Points that differ in one axis only: the right ones by speed, and those that are out."""

    axis: str
    shared: dict[str, Fact]
    right: tuple[Point, ...]
    out: tuple[Point, ...]

    @property
    def tied(self) -> tuple[Point, ...]:
        """The fastest, and those that are not slower by more than noise."""
        best = self.right[0]
        return tuple(p for p in self.right if p is best or lead(best, p) - 1 <= noise(best, p))

    @property
    def decided(self) -> bool:
        """True where the fastest is faster than any other by more than noise."""
        return len(self.right) > 1 and len(self.tied) == 1


def lead(first: Point, second: Point) -> float:
    """Speed of the first over the second's: 1.17."""
    return (first.tokens_per_s or 0.0) / second.tokens_per_s if second.tokens_per_s else 0.0


def noise(first: Point, second: Point) -> float:
    """How large a lead must be to mean something: the spread between processes, else inside them."""
    known = [p.spread for p in (first, second) if p.spread is not None]
    if len(known) == 2:
        return max(SURE, *known)
    inside = [s for p in (first, second) for r in p.ok if (s := stats.relative_iqr(stats.finite(r.step_s)))]
    return max([SINGLE, *known, *inside])


def answers(runs: Sequence[Run]) -> list[Answer]:
    """Which kernel, which compile mode, which dtype, how long a sequence; for each device in the rows."""
    timed = [point for point in points(runs) if _is_timed(point)]
    devices = list(dict.fromkeys(point.device_name for point in timed)) or [""]
    found = []
    for device in devices:
        some = [point for point in timed if point.device_name == device]
        where = f" ({device})" if len(devices) > 1 else ""
        for axis, question, noun in _QUESTIONS:
            answer = _which(some, axis, noun)
            found.append(msgspec.structs.replace(answer, question=question[:-1] + where + "?"))
        found.append(msgspec.structs.replace(_length(some), question=_LENGTH[:-1] + where + "?"))
    return found


def _is_timed(point: Point) -> bool:
    """False for a verdict without a time, and for what never ran."""
    return point.status != "skipped" and (point.status != "ok" or any(row.step_s for row in point.ok))


def _is_right(point: Point) -> bool:
    honoured = all(row.attention.honoured for row in point.ok if row.attention)
    return bool(point.status == "ok" and point.tokens_per_s and not point.wrong and honoured)


def _which(some: Sequence[Point], axis: str, noun: str) -> Answer:
    contests = [c for c in _contests(some, axis) if c.right and len(c.right) + len(c.out) > 1]
    if not contests:
        return Answer(question="", sentence=_cannot(some, axis, noun))
    chosen = max(contests, key=_weight)
    best = chosen.right[0]
    if len(chosen.right) == 1:
        sentence = (
            f"{_value(best, axis)}: the only one that ran right, {_figures(best)}{_where(chosen, some)}."
        )
    elif chosen.decided:
        sentence = (
            f"{_value(best, axis)}: {_figures(best)}{_where(chosen, some)}; "
            f"{ratio(lead(best, chosen.right[1]))} the next, {_value(chosen.right[1], axis)}."
        )
    else:
        *others, last = (_value(p, axis) for p in chosen.tied)
        sentence = (
            f"{', '.join(others)} and {last}: no difference that this run can tell apart{_where(chosen, some)}: "
            f"{ratio(lead(best, chosen.tied[-1]))}, {_noise_words(best, chosen.tied[-1])}."
        )
    return Answer(
        question="",
        sentence=one_line(sentence, 600),
        evidence=tuple(_evidence(chosen, contests, axis)),
        reservations=tuple(_reservations(chosen, contests, axis)),
    )


def _contests(some: Sequence[Point], axis: str) -> list[_Contest]:
    """Points grouped by all their other axes."""
    found: dict[tuple[tuple[str, Fact], ...], list[Point]] = {}
    for point in some:
        if axis in point.axes:
            shared = tuple((name, value) for name, value in point.axes.items() if name != axis)
            found.setdefault((("probe", point.probe), *shared), []).append(point)
    return [
        _Contest(
            axis=axis,
            shared=dict(shared[1:]),
            right=tuple(sorted((p for p in group if _is_right(p)), key=lambda p: -(p.tokens_per_s or 0))),
            out=tuple(p for p in group if not _is_right(p)),
        )
        for shared, group in found.items()
    ]


def _weight(contest: _Contest) -> tuple[bool, float, int, float]:
    """Where to look first: something to compare, at the longest sequence, with the most candidates, fast."""
    return (
        len(contest.right) > 1,
        _shared_seq(contest),
        len(contest.right),
        contest.right[0].tokens_per_s or 0.0,
    )


def _shared_seq(contest: _Contest) -> float:
    seq = contest.shared.get(X)
    return float(seq) if isinstance(seq, int | float) else 0.0


def _cannot(some: Sequence[Point], axis: str, noun: str) -> str:
    values = list(dict.fromkeys(fact(point.axes[axis]) for point in some if axis in point.axes))
    if not some:
        return "No row has a time: make quick measures this machine."
    if not values:
        return f"These rows have no axis {axis}: make quick compares several."
    if len(values) == 1:
        return (
            f"Not answered: only {values[0]} was tried; run a suite whose axes.{axis} lists another {noun}."
        )
    failed = ", ".join(dict.fromkeys(f"{_value(p, axis)} {_fault(p)}" for p in some if not _is_right(p)))
    if failed and not any(_is_right(p) for p in some):
        return f"None ran right ({failed}): see the failures, then make doctor."
    return f"Not answered: no two cells differ in {axis} alone; run a suite that has axes.{axis} = {values}."


def _value(point: Point, axis: str) -> str:
    """The axis' value; beside sdpa, the kernel that ran: it may be one of the others by another name."""
    value = one_line(str(point.axes[axis]), 60) if point.axes[axis] is not None else "none"
    return f"{value} ({point.kernel})" if axis == "attention" and point.kernel not in ("", value) else value


def _figures(point: Point) -> str:
    peak = f", {gib(point.peak_bytes)} GiB" if point.peak_bytes is not None else ""
    return f"{significant(point.tokens_per_s or 0)} tok/s{peak}"


def _where(contest: _Contest, some: Sequence[Point]) -> str:
    """The axes at which the contest was held, of those that vary."""
    names = varying(some)
    shared = {a: v for a, v in contest.shared.items() if a in names and a != X}
    words = [f"seq {fact(contest.shared[X])}"] if X in contest.shared else []
    words += [f"{axis} {fact(value)}" for axis, value in shared.items()]
    return f" at {', '.join(words)}" if words else ""


def _noise_words(first: Point, second: Point) -> str:
    known = [p.spread for p in (first, second) if p.spread is not None]
    if len(known) == 2:
        return f"spread {percent(max(known))}"
    return f"too few processes for a difference below {percent(noise(first, second))} to mean anything; set replicates"


def _evidence(chosen: _Contest, contests: Sequence[_Contest], axis: str) -> list[str]:
    lines = []
    if len(chosen.right) > 1:
        speeds = [f"{_value(p, axis)} {significant(p.tokens_per_s or 0)}" for p in chosen.right]
        lines.append("tok/s: " + ", ".join(speeds))
    if chosen.out:
        lines.append("out: " + "; ".join(f"{_value(p, axis)} ({_fault(p)})" for p in chosen.out))
    alone = [c for c in contests if len(c.right) == 1 and _shared_seq(c) > _shared_seq(chosen)]
    if alone:
        longest = max(alone, key=_shared_seq)
        lines.append(f"at seq {_shared_seq(longest):,.0f} only {_value(longest.right[0], axis)} ran right")
    return [one_line(line, 600) for line in lines]


def _fault(point: Point) -> str:
    """Why a point cannot win."""
    if point.status != "ok":
        return f"{point.status}: {one_line(point.reason, 100)}"
    if point.wrong:
        return f"wrong result, {point.verdict}: {one_line(point.verdict_reason, 100)}"
    if not point.tokens_per_s:
        return "no time"
    return f"another kernel ran: {point.kernel}"


def _reservations(chosen: _Contest, contests: Sequence[_Contest], axis: str) -> list[str]:
    best, lines = chosen.right[0], []
    named = chosen.right[:2] if chosen.decided else chosen.tied
    unchecked = [_value(p, axis) for p in named if p.verdict in (None, "no_reference")]
    if unchecked:
        lines.append(f"the result of {' and '.join(unchecked)} was not checked against a reference")
    if best.verdict == "caveat":
        lines.append(f"right with a caveat: {best.verdict_reason}")
    if chosen.decided and len(best.medians_s) < 2:
        lines.append("one process each: the spread between processes is not known; set replicates")
    lines += [f"{_value(best, axis)}: {d.text}" for d in doubts(best) if d.about == "speed"][:3]
    others = [c for c in contests if c.decided and c.right[0].axes[axis] != best.axes[axis]]
    if others:
        where = label({k: v for k, v in others[0].shared.items() if v != chosen.shared.get(k)})
        value = _value(others[0].right[0], axis)
        lines.append(
            f"in {count(len(others), 'setting')} of {len(contests)} another wins, e.g. {value} with {where}"
        )
    return [one_line(line) for line in lines]


def _length(some: Sequence[Point]) -> Answer:
    tried = [p for p in some if isinstance(p.axes.get(X), int)]
    right = [p for p in tried if _is_right(p)]
    if not right:
        return Answer(question="", sentence=_cannot_length(some, tried))
    longest = max(_seq(p) for p in right)
    at = [p for p in right if _seq(p) == longest]
    best = max(at, key=lambda p: p.tokens_per_s or 0)
    mode = label({a: best.axes[a] for a in varying(some) if a != X and a in best.axes})
    sentence = f"{longest:,} tokens{f' with {mode}' if mode else ''}: {_figures(best)}; {_next(tried, best)}."
    unchecked = best.verdict in (None, "no_reference")
    return Answer(
        question="",
        sentence=one_line(sentence, 600),
        evidence=(f"{count(len(at), 'mode')} ran right at {longest:,}",),
        reservations=("its result was not checked against a reference",) if unchecked else (),
    )


def _next(tried: Sequence[Point], best: Point) -> str:
    """How the next length up went, in the same mode if it was tried there."""
    longer = [p for p in tried if _seq(p) > _seq(best)]
    if not longer:
        return "the longest that was tried, so not a limit; a suite with more in axes.seq would find it"
    same = [p for p in longer if {**p.axes, X: 0} == {**best.axes, X: 0}]
    up = min(same or longer, key=_seq)
    whose = "the next" if same else "the next tried, in another mode,"
    return f"{whose}, {_seq(up):,}: {_fault(up)}".replace(",, ", ", ")


def _seq(point: Point) -> int:
    value = point.axes.get(X)
    return value if isinstance(value, int) else 0


def _cannot_length(some: Sequence[Point], tried: Sequence[Point]) -> str:
    if not some:
        return "No row has a time: make quick measures this machine."
    if not tried:
        return "These rows have no axis seq: make quick tries several."
    return f"None ran right; the shortest tried, {min(map(_seq, tried)):,}, ended so: {_fault(min(tried, key=_seq))}."
