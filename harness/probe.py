"""One diagnostic from the command line: python -m harness.probe NAME [axis=value[,value] …].

Without axes, the probe's own suite in suites/ is run; with them, a suite is made of what is given.
Exit codes are those of `python -m harness run`.
"""

from __future__ import annotations

import json
import sys
import typing
from pathlib import Path
from typing import Annotated, Literal, cast

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness import devices, session
from harness import suite as suites
from harness.__main__ import guarded, out
from harness.cells import Device, Probe
from harness.errors import HarnessError, unknown
from probes.table import table

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


@app.command(help=__doc__)
def probe(
    name: Annotated[str | None, typer.Argument(help="A probe; --list names them")] = None,
    axes: Annotated[list[str] | None, typer.Argument(help="axis=value[,value…]")] = None,
    show: Annotated[bool, typer.Option("--list", help="List the probes, their questions and axes")] = False,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: what this machine has")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Timed steps per cell")] = None,
    timeout_s: Annotated[float | None, typer.Option("--timeout", min=0.1, help="Seconds per cell")] = None,
    folder: Annotated[Path | None, typer.Option("--out", help="The run's folder")] = None,
) -> None:
    """Ask one probe one question."""
    probes = table()
    if show or name is None:
        for one in probes.values():
            _describe(one, out)
        return
    if name not in probes:
        raise unknown("probe", name, probes, "python -m harness.probe")
    if device not in (None, "cpu", "cuda"):
        raise unknown("device", device, ("cpu", "cuda"), "--device")
    chosen = cast("Device", device or devices.here())
    measure = {k: v for k, v in {"steps": steps, "timeout_s": timeout_s}.items() if v is not None}
    raise typer.Exit(ask(name, axes or [], chosen, measure, folder).exit_code)


def ask(
    name: str, axes: list[str], device: Device, measure: dict[str, float], folder: Path | None = None
) -> session.Outcome:
    """Run one probe with axes as `axis=value[,value]`, and print the verdicts."""
    suite = _suite(table()[name], axes, device, measure)
    outcome = session.execute(suite, session.Options(out=folder, fresh=True), out)
    _verdicts(outcome.folder, out)
    return outcome


def _suite(probe: Probe, given: list[str], device: Device, measure: dict[str, float]) -> suites.Suite:
    if not given and not measure:
        try:
            return suites.load(suites.find(probe.name, device), {probe.name: probe}, device)
        except HarnessError as error:
            if "unknown suite" not in str(error):
                raise
    lines = ["schema = 1", f'title = "{probe.question}"', f'probe = "{probe.name}"', f'device = "{device}"']
    lines += ["[measure]", *(f"{key} = {value}" for key, value in measure.items()), "[axes]"]
    for item in given:
        axis, _, values = item.partition("=")
        if not values:
            raise HarnessError(f"{item}: write it as axis=value or axis=value,value")
        lines.append(f"{axis} = [{', '.join(_toml(word) for word in values.split(','))}]")
    if not given:
        raise HarnessError(
            f"python -m harness.probe {probe.name}: give its axes as axis=value ({_axes(probe)}), "
            f"or run a suite of it: {', '.join(_suites_of(probe)) or 'there is none in suites/'}"
        )
    return suites.parse("\n".join(lines), f"{probe.name}.toml", {probe.name: probe})


def _toml(word: str) -> str:
    """Numbers and booleans as they are, anything else as a string."""
    try:
        return word if isinstance(json.loads(word), int | float) else json.dumps(word)
    except ValueError:
        return json.dumps(word)


def _describe(probe: Probe, console: Console) -> None:
    console.print(f"[bold]{probe.name}[/bold]: {probe.question}", soft_wrap=True)
    for field in msgspec.structs.fields(probe.axes):
        given = "required" if field.default is msgspec.NODEFAULT else f"default {field.default}"
        console.print(f"    {field.name}: {_choices(field.type)} ({given})", markup=False, soft_wrap=True)


def _suites_of(probe: Probe) -> list[str]:
    files = sorted(suites.SUITES.glob("*.toml"))
    named = [f for f in files if f'probe = "{probe.name}"' in f.read_text()]
    return list(dict.fromkeys(f"python -m harness run {f.name.split('.')[0]}" for f in named))


def _axes(probe: Probe) -> str:
    return ", ".join(probe.axes.__struct_fields__)


def _choices(kind: object) -> str:
    if typing.get_origin(kind) is Literal:
        return ", ".join(map(str, typing.get_args(kind)))
    if typing.get_origin(kind) is Annotated:
        return _choices(typing.get_args(kind)[0])
    return getattr(kind, "__name__", str(kind))


def _verdicts(folder: Path, console: Console) -> None:
    from reports.load import load_run

    view = Table("cell", "status", "verdict", "reason", box=None, pad_edge=False)
    for row in load_run(folder).rows:
        named = " ".join(f"{k}={v}" for k, v in row.axes.items())
        words = (named, row.status, row.verdict or "", row.reason or row.verdict_reason)
        view.add_row(*map(Text, words))
    console.print(view)


if __name__ == "__main__":
    sys.exit(guarded(app, "python -m harness.probe"))
