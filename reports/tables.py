"""Tables: what to show, how to round it, what to footnote. Templates only place the strings.

A column of the main table is one line of `_COLUMNS`.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from reports.doubts import About, Doubt, doubts
from reports.groups import Group
from reports.points import Point
from reports.text import NONE, Notes, fact, gib, percent, significant


class Column(msgspec.Struct, frozen=True):
    """Head and alignment."""

    name: str
    numeric: bool = False


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """Plain text throughout; escaping is the template's."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()


class _Line(msgspec.Struct, frozen=True):
    """What a cell of the main table is made from."""

    group: Group
    point: Point
    doubts: tuple[Doubt, ...]
    notes: Notes

    def marked(self, text: str, about: About) -> str:
        """`text` with the numbers of the footnotes about it."""
        marks = [self.notes.mark(doubt.text) for doubt in self.doubts if doubt.about == about]
        return " ".join([text, *marks])


def speed(group: Group) -> Table:
    """The main table: one line per mode and x; failed cells in place, skipped ones left out."""
    notes = Notes()
    columns = [(column, cell) for column, shown, cell in _COLUMNS if shown(group)]
    rows = []
    for point in (p for some in group.modes().values() for p in some):
        line = _Line(group, point, doubts(point), notes)
        rows.append(tuple(cell(line) for _, cell in columns))
    named = {
        "mode": group.head,
        "seq": group.x,
        "peak GiB": "peak RSS GiB" if group.device == "cpu" else "peak GiB",
    }
    heads = tuple(Column(named.get(c.name, c.name), c.numeric) for c, _ in columns)
    return Table(columns=heads, rows=tuple(rows), notes=notes.lines())


def _mode(line: _Line) -> str:
    return line.group.label(line.point) or "all"


def _x(line: _Line) -> str:
    return fact(line.point.axes.get(line.group.x))


def _tokens(line: _Line) -> str:
    point = line.point
    if point.status != "ok":
        return point.status
    if point.tokens_per_s is not None:
        text = significant(point.tokens_per_s)
        return line.marked(f"✗ {text}" if point.wrong else text, "speed")
    why = point.why_null("step_s") or ("no samples" if not point.step_s else "no token count")
    return line.marked(f"n/a ({why})", "speed")


def _spread(line: _Line) -> str:
    point = line.point
    if point.status != "ok" or not point.medians_s:
        return NONE
    if point.spread is None:
        return "1 run"
    return f"±{percent(point.spread / 2)} ({len(point.medians_s)})"


def _peak(line: _Line) -> str:
    point = line.point
    if point.status != "ok":
        return NONE
    return line.marked(NONE if point.peak_bytes is None else gib(point.peak_bytes), "memory")


def _first(line: _Line) -> str:
    value = line.point.first_step_s
    if value is not None:
        return line.marked(significant(value), "first")
    why = line.point.why_null("first_step_s")
    return f"n/a ({why})" if why else NONE


def _mfu(line: _Line) -> str:
    if line.point.status != "ok":
        return NONE
    return NONE if line.point.mfu is None else line.marked(percent(line.point.mfu), "mfu")


def _kernel(line: _Line) -> str:
    return line.marked(line.point.kernel or NONE, "kernel") if line.point.status == "ok" else NONE


def _check(line: _Line) -> str:
    if line.point.status != "ok":
        return NONE
    verdict = line.point.verdict
    text = verdict.upper() if verdict and line.point.wrong else verdict or "not checked"
    return line.marked(text.replace("_", " "), "check")


def _tags(line: _Line) -> str:
    if line.point.status != "ok":
        return "see below"
    return ", ".join(dict.fromkeys(doubt.tag for doubt in line.doubts))


def _always(group: Group) -> bool:
    return True


_COLUMNS: tuple[tuple[Column, Callable[[Group], bool], Callable[[_Line], str]], ...] = (
    (Column("mode"), _always, _mode),
    (Column("seq", True), lambda group: bool(group.x), _x),
    (Column("tok/s", True), _always, _tokens),
    (Column("spread", True), _always, _spread),
    (Column("peak GiB", True), _always, _peak),
    (Column("speed", True), _always, lambda line: line.group.relative(line.point, "tokens_per_s")),
    (Column("memory", True), _always, lambda line: line.group.relative(line.point, "peak_bytes", True)),
    (Column("first step s", True), _always, _first),
    (Column("MFU", True), lambda group: any(p.mfu is not None for p in group.points), _mfu),
    (Column("kernel that ran"), lambda group: any(p.kernel for p in group.points), _kernel),
    (Column("check"), _always, _check),
    (Column("notes"), _always, _tags),
)


def without_empty(table: Table) -> Table:
    """Without columns that say nothing in any row."""
    kept = [i for i in range(len(table.columns)) if any(row[i] not in ("", NONE) for row in table.rows)]
    rows = tuple(tuple(row[i] for i in kept) for row in table.rows)
    return Table(columns=tuple(table.columns[i] for i in kept), rows=rows, notes=table.notes)
