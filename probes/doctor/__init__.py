"""What this machine can do, decision by decision, with reasons: `python -m harness doctor`.

Regimes: no card; a card that no driver serves; a card that this torch has no kernels for; torch missing or
broken; a working card. Each gives a page, never a traceback.
Output:  sections of lines (what, value, mark, reason); mark is ok, note or problem, and a problem's reason
says what to do. Exit 0, or 1 when there is a problem. `--json` prints the same report as JSON.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from rich.console import Console

from harness.hardware import Inventory, inventory
from probes.doctor import compilers, decisions, driver, host, kernels, versions, wheel
from probes.doctor.page import render
from probes.doctor.report import Line, Report, Section

__all__ = ["Line", "Report", "Section", "examine", "main", "render"]


def examine(found: Inventory | None = None) -> Report:
    """Look at everything. A test gives the inventory of a machine that is not here."""
    cards = inventory() if found is None else found
    parts: tuple[tuple[str, Callable[[], list[Line]]], ...] = (
        (host.TITLE, host.lines),
        (driver.TITLE, lambda: driver.lines(cards)),
        (wheel.TITLE, lambda: wheel.lines(cards)),
        (versions.TITLE, lambda: versions.lines(cards)),
        (compilers.TITLE, lambda: compilers.lines(cards)),
        (kernels.TITLE, lambda: kernels.lines(cards)),
        (decisions.TITLE, lambda: decisions.lines(cards)),
    )
    return Report(sections=tuple(_section(title, look) for title, look in parts))


def _section(title: str, look: Callable[[], list[Line]]) -> Section:
    try:
        return Section(title=title, lines=tuple(look()))
    except Exception as error:  # one broken part, of torch or of ours, must not hide what the others found
        reason = f"{type(error).__name__}: {error}"
        return Section(title=title, lines=(Line(what=title, value="broke", mark="problem", reason=reason),))


def main(console: Console, as_json: bool) -> int:
    """Examine and print. Returns the exit code: 1 when a line is a problem."""
    report = examine()
    if as_json:
        text = msgspec.json.format(msgspec.json.encode(report), indent=2).decode()
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    else:
        render(report, console)
    return 1 if report.marked("problem") else 0
