"""What a suite would run: cells, skips with reasons, an estimate. No device, no torch."""

from __future__ import annotations

import collections

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from harness.progress import duration, short_name
from harness.session import estimate_s, varying
from harness.suite import Suite

_LISTED = 500


def show(suite: Suite, console: Console, list_cells: bool = True) -> None:
    """Print the plan; of a suite with very many cells, the first ones."""
    axes = varying(suite.cells)
    console.print(
        f"[bold]{escape(suite.file.title)}[/bold]  ({escape(suite.name)}: probe {suite.probe.name}, {suite.file.device})",
        soft_wrap=True,
    )
    fixed = {k: v for k, v in suite.cells[0].axes.items() if k not in axes} if suite.cells else {}
    console.print(Text(f"the same in every cell: {short_name(fixed, ())}", "dim"), soft_wrap=True)
    total = 0.0
    listed = 0
    for cell in suite.cells:
        seconds = 0.0 if cell.skip else estimate_s(suite, cell)
        total += seconds
        if list_cells and listed < _LISTED and not cell.skip:
            again = f" #{cell.replicate}" if cell.replicate else ""
            console.print(
                Text(f"  {short_name(cell.axes, axes)}{again}  ~{duration(seconds)}"), soft_wrap=True
            )
            listed += 1
    skips = collections.Counter(cell.skip for cell in suite.cells if cell.skip)
    runnable = len(suite.cells) - skips.total()
    if list_cells and listed < runnable:
        console.print(f"  … and {runnable - listed:,} more")
    for reason, count in skips.most_common():
        cells = "cell" if count == 1 else "cells"
        console.print(Text(f"  skipped, {count} {cells}: {reason}", "dim"), soft_wrap=True)
    for warning in suite.warnings:
        console.print(Text(f"note: {warning}", "yellow"), soft_wrap=True)
    console.print(f"{runnable:,} cells to run, {skips.total():,} skipped; about {duration(total)}")
