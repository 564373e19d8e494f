"""Tables of how cells ended: verdicts of diagnostic probes, failures, skips."""

from __future__ import annotations

from collections.abc import Sequence

from reports.groups import Group, varying
from reports.points import Point
from reports.tables import Column, Table, without_empty
from reports.text import Notes, count, fact, one_line


def verdicts(group: Group) -> Table:
    """Cells that give a verdict and no time: axes, verdict, reason."""
    axes = group.mode_axes + ((group.x,) if group.x else ())
    notes = Notes()
    rows = []
    for point in group.points:
        if point.status == "skipped":
            continue
        verdict = point.status if point.status != "ok" else point.verdict or "ok, no verdict"
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
    return without_empty(Table(columns=heads, rows=tuple(rows), notes=notes.lines()))


def failures(points: Sequence[Point], told: Sequence[Point] = ()) -> Table:
    """Every process that ended otherwise than well, skips apart.

    told: points that a table of verdicts shows already; of these, only what was not expected.
    """
    rows = []
    axes = varying(points)
    for point in points:
        for row in point.rows:
            if row.status in ("ok", "skipped") or (row.expected and point in told):
                continue
            run = str(row.replicate) if len(point.rows) > 1 else ""
            expected = "expected" if row.expected else "NOT EXPECTED"
            rows.append((named(point, axes), run, row.status, expected, one_line(row.reason)))
    heads = ("cell", "replicate", "status", "", "reason")
    return without_empty(Table(columns=tuple(Column(n) for n in heads), rows=tuple(rows)))


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
