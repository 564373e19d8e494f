"""Tables below the main one: what the compiler did, memory by phase, the tensors of failed checks."""

from __future__ import annotations

from collections.abc import Sequence

from harness.rows import Collective
from reports.groups import Group
from reports.points import Point
from reports.tables import Column, Table, without_empty
from reports.text import NONE, Notes, fact, gib, one_line, ratio, significant


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
    return without_empty(Table(columns=(*_heads(group), *(Column(n, True) for n in names)), rows=tuple(rows)))


def _largest(sizes: Sequence[int | None]) -> str:
    return gib(max(known)) if (known := [size for size in sizes if size is not None]) else NONE


def tensors(group: Group) -> Table:
    """The worst tensors of every check that did not pass."""
    rows = []
    for point in group.points:
        parity = next((r.parity for r in point.ok if r.parity and r.parity.verdict not in ("ok",)), None)
        wrong = parity is not None and parity.verdict != "caveat"
        for tensor in parity.worst if parity else ():
            if not wrong and not tensor.problem:
                continue
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


def ranks(group: Group) -> Table:
    """Cells of several ranks: scaling, memory of each rank, what travelled against the formula, balance."""
    rows = []
    for point in group.points:
        for row in point.ok[:1]:
            size = row.axes.get("cp_size")
            if not isinstance(size, int) or "bytes_sent" not in row.facts:
                continue
            peaks = [row.facts.get(f"rank{rank}_peak_bytes") for rank in range(size)]
            rows.append(
                (
                    *_name(group, point),
                    *_scaling(group, point, row.facts.get("devices")),
                    " ".join(gib(peak) if isinstance(peak, int) else NONE for peak in peaks),
                    *(_mib(row.facts.get(name)) for name in ("bytes_sent", "bytes_by_formula")),
                    ", ".join(_tally(kind, c) for kind, c in row.collectives.items()) or NONE,
                    *(_seconds(row.facts.get(n)) for n in ("collective_s", "collective_exposed_s")),
                    _seconds(row.facts.get("score_area_busiest_over_mean")),
                )
            )
    numbers = ("tok/s per device", "efficiency")
    sent = ("MiB sent", "by formula")
    last = ("on the GPU, s", "of it exposed, s", "busiest / mean")
    heads = (
        *_heads(group),
        *(Column(n, True) for n in numbers),
        Column("peak GiB of each rank"),
        *(Column(n, True) for n in sent),
        Column("collectives: calls, host's seconds"),
        *(Column(n, True) for n in last),
    )
    return without_empty(Table(columns=heads, rows=tuple(rows)))


def _scaling(group: Group, point: Point, devices: object) -> tuple[str, str]:
    """Tokens per second and device, and that against the baseline's; nothing where ranks share a device."""
    if devices != point.axes.get("cp_size") or not isinstance(devices, int) or not point.tokens_per_s:
        return NONE, NONE
    each, base = point.tokens_per_s / devices, group.against(point)
    known = base is not None and base.tokens_per_s and not point.wrong
    return significant(each), ratio(each / base.tokens_per_s) if known else NONE  # type: ignore[union-attr, operator]


def _tally(kind: str, found: Collective) -> str:
    seconds = f", {significant(found.seconds)} s" if found.seconds is not None else ""
    return f"{kind} {found.calls:,}x{seconds}"


def _mib(size: object) -> str:
    return f"{size / 2**20:,.2f}" if isinstance(size, int | float) else NONE


def _seconds(value: object) -> str:
    return significant(value) if isinstance(value, int | float) else NONE


def _heads(group: Group) -> tuple[Column, ...]:
    return (Column(group.head), *((Column(group.x, True),) if group.x else ()))


def _name(group: Group, point: Point) -> tuple[str, ...]:
    return (group.label(point) or "all", *((fact(point.axes.get(group.x)),) if group.x else ()))
