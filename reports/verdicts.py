"""What a probe's rows say, on the console; the matrix as a table of its own, kept in the run's folder."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.rows import Row
from reports import lowering, matrix
from reports.load import load_run
from reports.text import one_line

_LOG_LINES = 5
_FAILING = ("mismatch", "nonfinite")


def show(folder: Path, console: Console) -> list[Row]:
    """Print the verdicts of the run in `folder`; returns its rows, in the order of their axes."""
    run = load_run(folder)
    rows = sorted(run.rows, key=lambda row: row.started_at or "~")
    if run.meta.get("probe") in ("compile-matrix", "volta-lowering"):
        rows = sorted(rows, key=lambda row: [str(row.axes[a]) for a in ("model", "mode", "dtype")])
        _matrix(rows, console)
        page = folder / "MATRIX.md"
        page.write_text(matrix.markdown(rows), encoding="utf-8")
        console.print(f"table: {page}", markup=False, soft_wrap=True)
    elif run.meta.get("probe") == "triton-lowering":
        _aligned([lowering.COLUMNS, *lowering.lines([r for r in rows if r.status != "skipped"])], console)
        _skips(rows, console)
    else:
        words = [
            (_named(row), row.status, row.verdict or "", row.reason or row.verdict_reason) for row in rows
        ]
        _print(("cell", "status", "verdict", "reason"), words, console)
        for note in dict.fromkeys(note for row in rows for note in row.notes):
            console.print(f"note: {note}", style="dim", markup=False, soft_wrap=True)
    for row in rows:
        _tell(row, console)
    return rows


def failing(rows: Sequence[Row]) -> list[Row]:
    """Cells that came out wrong, or whose compiler broke, and that nobody expected to."""
    broken = ("crashed", "timeout", "error")
    return [r for r in rows if not r.expected and (r.verdict in _FAILING or r.status in broken)]


def _matrix(rows: Sequence[Row], console: Console) -> None:
    """What ran, in columns that are never folded; what was skipped, by its reason."""
    if rows and (said := matrix.label(rows[0].probe)):
        console.print(said, style="yellow", markup=False, soft_wrap=True)
    _aligned([matrix.COLUMNS, *matrix.lines([r for r in rows if r.status != "skipped"])], console)
    _skips(rows, console)


def _aligned(lines: Sequence[tuple[str, ...]], console: Console) -> None:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        words = "  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True))
        console.print(words.rstrip(), markup=False, soft_wrap=True)


def _skips(rows: Sequence[Row], console: Console) -> None:
    for reason, count in collections.Counter(r.reason for r in rows if r.status == "skipped").items():
        console.print(f"skipped, {count}: {reason}", style="dim", markup=False, soft_wrap=True)


def _print(columns: tuple[str, ...], lines: Sequence[tuple[str, ...]], console: Console) -> None:
    view = Table(*columns, box=None, pad_edge=False)
    for line in lines:
        view.add_row(*map(Text, line))
    console.print(view)


def _tell(row: Row, console: Console) -> None:
    """The log's last lines, where the cell ended badly."""
    if not row.log_tail:
        return
    console.print(
        f"{_named(row)}: {row.status}: {one_line(row.reason)}", style="red", markup=False, soft_wrap=True
    )
    for line in row.log_tail[-_LOG_LINES:]:
        console.print(f"    {line}", markup=False, soft_wrap=True)


def _named(row: Row) -> str:
    return " ".join(f"{k}={v}" for k, v in row.axes.items())
