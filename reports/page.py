"""The page as data: sections of plain strings, tables and pictures. Two templates place them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from reports import details, matrix, outcomes, tables
from reports.answers import Answer, answers
from reports.groups import RANKS, Group, groups, label, varying
from reports.load import Run
from reports.points import Point, labels, points
from reports.run_facts import facts, warnings
from reports.tables import Table
from reports.text import count, fact, one_line

Kind = Literal["speed", "memory"]


class Picture(msgspec.Struct, frozen=True):
    """A plot to be drawn, and what it shows in words."""

    path: str  # relative to the page
    kind: Kind
    group: Group
    text: str


class Detail(msgspec.Struct, frozen=True):
    """Lines that are folded away: a log, a command."""

    summary: str
    lines: tuple[str, ...]


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """A heading and what stands under it, in this order."""

    title: str
    level: int = 2
    paragraphs: tuple[str, ...] = ()
    bullets: tuple[str, ...] = ()
    pictures: tuple[Picture, ...] = ()
    table: Table | None = None
    details: tuple[Detail, ...] = ()
    code: tuple[str, ...] = ()


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """A whole report."""

    title: str
    answers: tuple[Answer, ...]
    sections: tuple[Section, ...]


def page(runs: Sequence[Run]) -> Page:
    """Everything the report of these runs says. A pure function of them."""
    all_points, all_groups = points(runs), groups(runs)
    title = runs[0].title if len(runs) == 1 else f"{len(runs)} runs: " + ", ".join(labels(runs))
    timed = any(group.timed for group in all_groups)
    said = tuple(answers(runs)) if timed else ()
    sections = (
        *_runs(runs),
        *_groups(all_groups),
        *_not_run(all_points, [p for g in all_groups if not g.timed for p in g.points]),
        *(_method(all_groups) if timed else ()),
    )
    return Page(title=one_line(title), answers=said, sections=sections)


def _runs(runs: Sequence[Run]) -> Iterator[Section]:
    for name, run in zip(labels(runs), runs, strict=True):
        columns = (tables.Column("what"), tables.Column("found"))
        yield Section(
            title="What was run" if len(runs) == 1 else f"What was run: {name}",
            paragraphs=() if run.rows else ("No rows: nothing was measured.",),
            table=Table(columns=columns, rows=facts(run)),
            bullets=warnings(run),
            code=(" ".join(str(word) for word in run.meta.get("command", ())),),
        )


def _groups(all_groups: Sequence[Group]) -> Iterator[Section]:
    for number, group in enumerate(all_groups, 1):
        if all(point.status == "skipped" for point in group.points):
            continue
        title = _title(group, all_groups)
        if not group.timed:
            yield Section(title=title, paragraphs=_caption(group), table=outcomes.verdicts(group))
            continue
        table = tables.speed(group)
        yield Section(title=title, paragraphs=_caption(group), pictures=_pictures(group, number), table=table)
        yield from _below(group)


def _below(group: Group) -> Iterator[Section]:
    parts = (
        ("What the compiler did", details.compiler(group), ""),
        ("Ranks", details.ranks(group), _RANKS),
        ("Memory, GiB", details.memory(group), _MEMORY[group.device != "cpu"]),
        ("Checks that did not pass: the worst tensors", details.tensors(group), _NORM),
    )
    least = 3 if group.x else 2  # a lone column of memory is in the main table already
    for title, table, text in parts:
        if table.rows and len(table.columns) > least:
            yield Section(title=title, level=3, paragraphs=(text,) if text else (), table=table)


_NORM = (
    "Errors are RMS(candidate - reference) / RMS(reference), per tensor; eager's own error stands beside it."
)
_RANKS = (
    "Efficiency: tok/s per device against the baseline's at the same length; none where ranks share a device. Bytes are "
    "attention's, of one step and the busiest rank. Busiest / mean: the causal score area of the busiest rank. On the "
    "GPU, exposed: time in NCCL's kernels of one step, and what of it no other kernel covers."
)
_MEMORY = (
    "Resident set of the whole process: on a CPU there is no allocator to ask.",
    "Peaks of the device's allocator: steady steps, and the first step, in which compilation happens.",
)


def _title(group: Group, all_groups: Sequence[Group]) -> str:
    """What tells this group apart: the device, and the axes that split the tables."""
    split = {a: v for a, v in group.fixed.items() if any(g.fixed.get(a, v) != v for g in all_groups)}
    several = len({g.probe for g in all_groups if g.timed}) > 1
    what = "Speed and memory" if group.timed else f"Verdicts of {group.probe}"
    of = f" of {group.probe}" if several and group.timed else ""
    words = [f"{what}{of} on {group.device_name or group.device}", label(split) if split else ""]
    return one_line(", ".join(word for word in words if word))


def _caption(group: Group) -> tuple[str, ...]:
    fixed = ", ".join(f"{axis} {fact(value)}" for axis, value in group.fixed.items())
    lines = [f"Same for all: {fixed}."] if fixed else []
    lines += [said] if (said := matrix.label(group.probe)) else []
    if group.timed and group.mode_axes and any(group.against(p) for p in group.points):
        base = label(group.baseline)
        same = f" at the same {group.x}" if group.x and group.x not in group.baseline else ""
        lines.append(f"Speed and memory are ratios to {base}{same}.")
    flops = any(row.flops_per_step for p in group.points for row in p.rows)
    if flops and not any(p.mfu is not None for p in group.points):
        lines.append(f"MFU: n/a, the peak FLOP/s of {group.device_name} at this dtype is not known.")
    return tuple(one_line(line) for line in lines)


def _pictures(group: Group, number: int) -> tuple[Picture, ...]:
    if not any(point.tokens_per_s for point in group.points):
        return ()
    over = {"": "", RANKS: " over ranks"}.get(group.x, " over sequence length")
    kinds: tuple[tuple[Kind, str], ...] = (("speed", "tokens/s"), ("memory", "peak memory"))
    shown = [k for k in kinds if k[0] == "speed" or any(point.peak_bytes for point in group.points)]
    return tuple(
        Picture(f"plots/{kind}-{number}.png", kind, group, f"{name}{over}, one mark per mode")
        for kind, name in shown
    )


def _not_run(all_points: Sequence[Point], told: Sequence[Point]) -> Iterator[Section]:
    failed = outcomes.failures(all_points, told)
    if failed.rows:
        axes = varying(all_points)
        details = tuple(
            Detail(f"log of {outcomes.named(point, axes)}: {row.status}", row.log_tail)
            for point in all_points
            for row in point.rows
            if row.log_tail and not row.expected
        )
        yield Section(title="What failed", table=failed, details=details)
    skipped = outcomes.skips(all_points)
    if skipped.rows:
        total = sum(point.status == "skipped" for point in all_points)
        text = f"Not run: {count(total, 'cell')} of {len(all_points):,}."
        yield Section(title="What was skipped", paragraphs=(text,), table=skipped)


def _method(all_groups: Sequence[Group]) -> Iterator[Section]:
    cpu = any(group.device == "cpu" for group in all_groups)
    bullets = (
        "tok/s: tokens per step / the median of the processes' median step times. Steady steps only; the first "
        "step (tracing, compilation, one step) stands apart.",
        "spread: ± half of (largest - smallest) / median between the medians of so many processes. "
        "“1 run”: one process, so the spread is unknown.",
        "peak: the largest of the processes, steady steps; 1 GiB = 2³⁰ bytes."
        + (" On a CPU: the resident set of the whole process, libraries included." if cpu else ""),
        "speed, memory: this mode / the baseline. MFU: model FLOPs (recomputation not counted) / time / peak FLOP/s.",
        "kernel that ran: from the profiler, not from the request. check: loss and every gradient against a "
        "reference in higher precision. ✗ marks the speed of a wrong result.",
    )
    yield Section(title="How to read this", bullets=bullets)
