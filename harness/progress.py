"""What a person sees while a suite runs: one live line per running cell, or plain lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from harness.cells import Cell
from harness.rows import Row
from harness.stats import finite, median

_STYLES = {"ok": "green", "skipped": "dim", "unsupported": "yellow", "oom": "yellow"}


class Watch:
    """Progress of one run. A context manager; plain lines when the output is not a terminal."""

    def __init__(
        self,
        console: Console,
        cells: int,
        done: int,
        varying: tuple[str, ...],
        estimate_s: Callable[[Cell], float],
    ) -> None:
        self._console = console
        self._total = cells
        self._done = done
        self._varying = varying
        self._estimate = estimate_s
        self._left_s = 0.0
        self._spent_s = self._guessed_s = 0.0
        self._running: dict[str, tuple[Cell, float]] = {}
        self._live = (
            Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else None
        )

    def __enter__(self) -> Watch:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def expect(self, left_s: float) -> None:
        """The plan's estimate for the cells still to run."""
        self._left_s = left_s

    def started(self, cell: Cell) -> None:
        self._running[cell.id] = (cell, time.monotonic())
        self.tick()

    def ended(self, cell: Cell, row: Row) -> None:
        self._done += 1
        _, began = self._running.pop(cell.id, (cell, time.monotonic()))
        guess = self._estimate(cell) if row.status != "skipped" else 0.0
        self._left_s -= guess
        self._guessed_s += guess
        self._spent_s += time.monotonic() - began
        if row.status != "skipped" or not self._live:
            self._console.print(self._line(cell, row), soft_wrap=True)
        self.tick()

    def tick(self) -> None:
        if self._live:
            lines = [
                Text(f"  … {self.name(cell)}  {time.monotonic() - began:.0f} s", "cyan")
                for cell, began in self._running.values()
            ]
            self._live.update(Group(*lines, Text(f"{self._done}/{self._total} cells, {self._eta()}", "bold")))

    def name(self, cell: Cell) -> str:
        """The axes that vary in this run, in the suite's order."""
        return short_name(cell.axes, self._varying) + (f" #{cell.replicate}" if cell.replicate else "")

    def _line(self, cell: Cell, row: Row) -> Text:
        mark = "" if row.expected else "  UNEXPECTED"
        text = Text(f"[{self._done}/{self._total}] {self.name(cell)}: ")
        text.append(row.status, _STYLES.get(row.status, "red"))
        text.append(f"{_figures(row)}{mark}")
        if row.reason:
            text.append(f": {row.reason.splitlines()[0]}")
        if row.verdict and row.verdict != "ok":
            text.append(f"  [{row.verdict}] {row.verdict_reason}")
        return text

    def _eta(self) -> str:
        pace = self._spent_s / self._guessed_s if self._guessed_s else 1.0
        return f"about {duration(max(0.0, self._left_s) * pace)} left"


def short_name(axes: Mapping[str, object], varying: tuple[str, ...]) -> str:
    """ "attention=flash seq=8192": the given axes, or all where none varies."""
    return " ".join(f"{axis}={axes[axis]}" for axis in varying or tuple(axes))


def duration(seconds: float) -> str:
    """ "45 s", "3 min", "2.5 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _figures(row: Row) -> str:
    step = median(finite(row.step_s))
    parts = []
    if step and row.tokens_per_step:
        parts.append(f"{row.tokens_per_step / step:,.0f} tok/s")
    if row.first_step_s is not None:
        parts.append(f"first step {row.first_step_s:.2f} s")
    if row.wall_s is not None:
        parts.append(f"cell {row.wall_s:.2f} s")
    return "  " + ", ".join(parts) if parts else ""
