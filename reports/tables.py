"""Tables: what to show, how to round it, what to footnote. Templates only place the strings.

A column of the main table is one line of `_COLUMNS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from reports.doubts import About, Doubt, doubts
from reports.groups import Group, varying
from reports.points import Point
from reports.text import NONE, Notes, count, fact, gib, one_line, percent, significant


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
    named = {"mode": group.head, "peak GiB": "peak RSS GiB" if group.device == "cpu" else "peak GiB"}
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


def verdicts(group: Group) -> Table:
    """Cells that give a verdict and no time: axes, verdict, reason."""
    axes = group.mode_axes + ((group.x,) if group.x else ())
    notes = Notes()
    rows = []
    for point in group.points:
        if point.status == "skipped":
            continue
        verdict = point.status if point.status != "ok" else point.verdict or "ok"
        surprise = "" if all(row.expected for row in point.rows) else "not expected"
        said = [
            *(row.notes for row in point.ok),
            *((f"{k}: {why}",) for r in point.ok for k, why in r.nulls.items()),
        ]
        marks = [notes.mark(one_line(note)) for some in said for note in some]
        shown = " ".join([verdict.replace("_", " "), *dict.fromkeys(marks)])
        reason = point.reason or point.verdict_reason
        rows.append((*(fact(point.axes.get(axis)) for axis in axes), shown, one_line(reason), surprise))
    heads = (
        *(Column(axis, axis == group.x) for axis in axes),
        Column("verdict"),
        Column("reason"),
        Column(""),
    )
    return _without_empty(Table(columns=heads, rows=tuple(rows), notes=notes.lines()))


def compiler(group: Group) -> Table:
    """What the compiler did, for cells that asked for it."""
    notes = Notes()
    rows = []
    for point in group.points:
        for report in [row.compile for row in point.ok if row.compile and row.compile.asked != "none"][:1]:
            breaks = [f"{b.reason} ({b.where})" if b.where else b.reason for b in report.graph_breaks]
            phases = ", ".join(f"{k} {significant(v)}" for k, v in report.phases_s.items() if v is not None)
            rows.append(
                (
                    *_name(group, point),
                    f"{report.graphs:,}",
                    _counted(breaks, notes),
                    _counted(report.recompiles, notes),
                    _counted(report.fallbacks, notes),
                    _cudagraphs(report.cudagraphs, report.cudagraph_skips, notes),
                    phases or NONE,
                )
            )
    numbers = ("graphs", "breaks", "recompiles", "ran eagerly")
    heads = (*_heads(group), *(Column(n, True) for n in numbers), Column("cudagraphs"), Column("phases, s"))
    return Table(columns=heads, rows=tuple(rows), notes=notes.lines())


def _counted(reasons: Sequence[str], notes: Notes) -> str:
    marks = dict.fromkeys(notes.mark(one_line(reason)) for reason in reasons)
    return " ".join([str(len(reasons)), *marks])


def _cudagraphs(used: bool, skips: Sequence[str], notes: Notes) -> str:
    marks = dict.fromkeys(notes.mark(f"cudagraph skipped: {one_line(reason)}") for reason in skips)
    return " ".join(["used" if used else "skipped" if skips else "off", *marks])


def memory(group: Group) -> Table:
    """Peaks of steady steps beside those of the first step, in which compilation happens."""
    rows = []
    for point in group.points:
        if point.status != "ok":
            continue
        kept = [row.memory for row in point.ok]
        peaks = [
            [m.allocated_peak_bytes for m in kept],
            [m.reserved_peak_bytes for m in kept],
            [m.compile_allocated_peak_bytes for m in kept],
            [m.compile_reserved_peak_bytes for m in kept],
            [m.host_peak_bytes for m in kept],
        ]
        rows.append((*_name(group, point), *(_largest(some) for some in peaks)))
    names = ("steady", "steady, reserved", "first step", "first step, reserved", "host, whole process")
    return _without_empty(
        Table(columns=(*_heads(group), *(Column(n, True) for n in names)), rows=tuple(rows))
    )


def _largest(sizes: Sequence[int | None]) -> str:
    return gib(max(known)) if (known := [size for size in sizes if size is not None]) else NONE


def tensors(group: Group) -> Table:
    """The worst tensors of every check that did not pass."""
    rows = []
    for point in group.points:
        parity = next((r.parity for r in point.ok if r.parity and r.parity.verdict not in ("ok",)), None)
        for tensor in parity.worst if parity else ():
            numbers = (tensor.error, tensor.eager_error, tensor.cosine)
            shown = ("n/a" if value is None else f"{value:.2g}" for value in numbers[:2])
            cosine = "n/a" if tensor.cosine is None else f"{tensor.cosine:.6f}"
            outliers = f"{tensor.outliers:,}"
            rows.append(
                (
                    *_name(group, point),
                    tensor.name,
                    *shown,
                    cosine,
                    outliers,
                    one_line(tensor.problem) or NONE,
                )
            )
    names = ("error", "eager's error", "cosine", "outliers")
    heads = (*_heads(group), Column("tensor"), *(Column(n, True) for n in names), Column("problem"))
    return Table(columns=heads, rows=tuple(rows))


def failures(points: Sequence[Point]) -> Table:
    """Every process that ended otherwise than well, skips apart."""
    rows = []
    axes = varying(points)
    for point in points:
        for row in point.rows:
            if row.status in ("ok", "skipped"):
                continue
            run = str(row.replicate) if len(point.rows) > 1 else ""
            expected = "expected" if row.expected else "NOT EXPECTED"
            rows.append((named(point, axes), run, row.status, expected, one_line(row.reason)))
    heads = ("cell", "replicate", "status", "", "reason")
    return _without_empty(Table(columns=tuple(Column(n) for n in heads), rows=tuple(rows)))


def skips(points: Sequence[Point]) -> Table:
    """Cells that were not run, by reason."""
    why: dict[str, list[Point]] = {}
    for point in points:
        if point.status == "skipped":
            why.setdefault(one_line(point.reason), []).append(point)
    rows = []
    axes = varying(points)
    for reason, some in why.items():
        shown = "; ".join(named(point, axes) for point in some[:3])
        more = f"; and {len(some) - 3} more" if len(some) > 3 else ""
        rows.append((count(len(some), "cell"), reason, shown + more))
    heads = (Column("cells", True), Column("reason"), Column("which"))
    return Table(columns=heads, rows=tuple(rows))


def named(point: Point, axes: Sequence[str]) -> str:
    """A cell by the axes that vary: `attention=math compile=none seq=8192`."""
    shown = [axis for axis in axes if axis in point.axes]
    return " ".join(f"{axis}={one_line(str(point.axes[axis]), 60)}" for axis in shown) or "the only cell"


def _heads(group: Group) -> tuple[Column, ...]:
    return (Column(group.head), *((Column(group.x, True),) if group.x else ()))


def _name(group: Group, point: Point) -> tuple[str, ...]:
    return (group.label(point) or "all", *((fact(point.axes.get(group.x)),) if group.x else ()))


def _without_empty(table: Table) -> Table:
    """Without columns that say nothing in any row."""
    kept = [i for i in range(len(table.columns)) if any(row[i] not in ("", NONE) for row in table.rows)]
    rows = tuple(tuple(row[i] for i in kept) for row in table.rows)
    return Table(columns=tuple(table.columns[i] for i in kept), rows=rows, notes=table.notes)
