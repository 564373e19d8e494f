"""The report on a terminal: what, value, mark, and the reason below where there is one."""

from __future__ import annotations

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from probes.doctor.report import Line, Mark, Report, Section

_LOOK: dict[Mark, str] = {"ok": "green", "note": "yellow", "problem": "bold red"}
_WHAT_COLUMNS = 22


def render(report: Report, console: Console) -> None:
    """Print every section, then what needs attention."""
    for section in report.sections:
        if section.lines:
            console.print(Text(section.title, style="bold"))
            console.print(Padding(_table(section), (0, 0, 1, 2)))
    console.print(_summary(report))


def _table(section: Section) -> Table:
    table = Table.grid(padding=(0, 2), expand=False)
    table.add_column(no_wrap=True, width=len("problem"))
    table.add_column(width=_WHAT_COLUMNS, overflow="fold")
    table.add_column(overflow="fold")
    for line in section.lines:
        table.add_row(Text(line.mark, style=_LOOK[line.mark]), line.what, _finding(line))
    return table


def _finding(line: Line) -> Text:
    text = Text(line.value)
    if line.reason:
        # A problem's reason is what to do, so it is not set back like an explanation.
        text.append("\n" + line.reason, style="" if line.mark == "problem" else "dim")
    return text


def _summary(report: Report) -> Text:
    problems, notes = len(report.marked("problem")), len(report.marked("note"))
    if not problems:
        said = f", {notes} to know about" if notes else ""
        return Text(f"No problem found{said}.", style=_LOOK["ok"])
    text = Text(f"{problems} problem{'s' * (problems > 1)}, {notes} to know about:", style=_LOOK["problem"])
    for line in report.marked("problem"):
        text.append(f"\n  {line.what}: {line.reason}", style="not bold")
    return text
