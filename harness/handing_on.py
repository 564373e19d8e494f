"""Failing cells of one probe, handed on to another with the same axes: compile-matrix to bisect."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from harness import session
from harness import suite as suites
from harness.cells import Device, Probe, ProbeTable
from harness.rows import Row

MOST = 3
_TIMEOUT_S = 900


def run(
    table: ProbeTable, probe: Probe, rows: Sequence[Row], device: Device, folder: Path, console: Console
) -> None:
    """Run the other probe on the first MOST rows, in a folder inside the run's; name the command for the rest."""
    if not probe.hands_on_to:
        return
    other = table[probe.hands_on_to]
    inside = folder / other.name
    console.print(f"handing {min(MOST, len(rows))} failing cells on to {other.name}", soft_wrap=True)
    suite = suites.parse(text(other, rows[:MOST], device), f"{other.name}.toml", {other.name: other})
    session.execute(suite, session.Options(out=inside, fresh=True), console)
    for row in rows[MOST:]:
        named = " ".join(f"{k}={_plain(v)}" for k, v in row.axes.items())
        console.print(f"not handed on: python -m harness.probe {other.name} {named}", soft_wrap=True)


def text(probe: Probe, rows: Sequence[Row], device: Device) -> str:
    """A suite of exactly these cells, in which every verdict is an answer."""
    head = ["schema = 1", f'title = "{probe.question}"', f'probe = "{probe.name}"', f'device = "{device}"']
    head += [f"measure = {{ timeout_s = {_TIMEOUT_S} }}"]
    for row in rows:
        head += ["[[include]]", *(f"{k} = {json.dumps(v)}" for k, v in row.axes.items())]
    any_verdict = '["ok", "caveat", "mismatch", "nonfinite", "no_reference"]'
    for row in rows:
        when = ", ".join(f"{k} = {json.dumps(v)}" for k, v in row.axes.items())
        head += ["[[expect]]", f"when = {{ {when} }}", f"verdict = {any_verdict}"]
    return "\n".join(head)


def _plain(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
