"""One diagnostic from the command line: python -m harness.probe NAME [axis=value[,value] …].

Without axes, the probe's own suite in suites/ is run; with them, a suite is made of what is given.
Exit codes are those of `python -m harness run`: 1 where a cell ends worse than suites/expected/ says, or than well.
"""

from __future__ import annotations

import itertools
import json
import sys
import typing
from pathlib import Path
from typing import Annotated, Literal, cast

import msgspec
import typer
from rich.console import Console

from harness import devices, expectations, handing_on, session
from harness import suite as suites
from harness.__main__ import guarded, out
from harness.cells import AxisValue, Device, FromFile, Probe
from harness.errors import HarnessError, unknown
from probes.table import table
from reports import verdicts

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
    file: Annotated[
        Path | None, typer.Option(help="Kernels of this file or folder (triton-lowering)")
    ] = None,
    accept: Annotated[
        Path | None, typer.Option(help="Take this run's rows for what is expected; runs nothing")
    ] = None,
    hand_on: Annotated[
        bool, typer.Option("--bisect/--no-bisect", help="Hand failing cells of compile-matrix on to bisect")
    ] = True,
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
    if accept is not None:
        if axes or steps or timeout_s or folder or device or file:
            raise HarnessError(
                "--accept RUN takes no other option: it reads that run's rows, and runs nothing"
            )
        _accept(probes[name], accept)
        return
    chosen = cast("Device", device or devices.here())
    if not hand_on and not probes[name].hands_on_to:
        raise HarnessError(f"--no-bisect: {name} hands no cell on to another probe")
    measure = {k: v for k, v in {"steps": steps, "timeout_s": timeout_s}.items() if v is not None}
    raise typer.Exit(ask(name, axes or [], chosen, measure, folder, hand_on=hand_on, file=file).exit_code)


def ask(
    name: str,
    axes: list[str],
    device: Device,
    measure: dict[str, float],
    folder: Path | None = None,
    *,
    hand_on: bool = True,
    file: Path | None = None,
) -> session.Outcome:
    """Run one probe with axes as `axis=value[,value]`, print the verdicts, hand failing cells on."""
    probes = table()
    known = expectations.read(expectations.path_of(name, device))
    suite = expectations.applied(_suite(probes[name], axes, device, measure, file), known)
    outcome = session.execute(suite, session.Options(out=folder, fresh=True), out)
    rows = verdicts.show(outcome.folder, out)
    if improved := expectations.better(rows, known):
        for line in improved:
            out.print(f"better than expected: {line}", style="green", markup=False, soft_wrap=True)
        again = f"python -m harness.probe {name} --accept {outcome.folder}"
        out.print(f"refresh what is expected: {again}", markup=False, soft_wrap=True)
    if hand_on and not outcome.interrupted and (failed := verdicts.failing(rows)):
        handing_on.run(probes, probes[name], failed, device, outcome.folder, out)
    return outcome


def _accept(probe: Probe, folder: Path) -> None:
    from reports.load import load_run

    run = load_run(folder)
    if run.meta.get("probe") != probe.name:
        raise HarnessError(f"--accept {folder}: is a run of {run.meta.get('probe')!r}, not of {probe.name!r}")
    path = expectations.path_of(probe.name, run.meta["device"])
    taken = expectations.write(path, run.rows)
    out.print(f"{path}: {taken} cells taken from {folder}", markup=False, soft_wrap=True)


def _suite(
    probe: Probe, given: list[str], device: Device, measure: dict[str, float], file: Path | None = None
) -> suites.Suite:
    if not given and not measure and not file:
        try:
            return suites.load(suites.find(probe.name, device), {probe.name: probe}, device)
        except HarnessError as error:
            if "unknown suite" not in str(error):
                raise
    lines = ["schema = 1", f'title = "{probe.question}"', f'probe = "{probe.name}"', f'device = "{device}"']
    lines += ["[measure]", *(f"{key} = {value}" for key, value in measure.items())]
    axes = _given(given)
    if probe.from_file is not None:
        lines += _cells_of(file, probe.from_file, axes)
    elif file is not None:
        raise HarnessError(f"--file {file}: {probe.name} takes no file")
    elif axes:
        lines += [
            "[axes]",
            *(f"{axis} = [{', '.join(map(json.dumps, values))}]" for axis, values in axes.items()),
        ]
    else:
        raise HarnessError(
            f"python -m harness.probe {probe.name}: give its axes as axis=value ({_axes(probe)}), "
            f"or run a suite of it: {', '.join(_suites_of(probe)) or 'there is none in suites/'}"
        )
    return suites.parse("\n".join(lines), f"{probe.name}.toml", {probe.name: probe})


def _given(words: list[str]) -> dict[str, list[AxisValue]]:
    axes: dict[str, list[AxisValue]] = {}
    for item in words:
        axis, _, values = item.partition("=")
        if not values:
            raise HarnessError(f"{item}: write it as axis=value or axis=value,value")
        if axis in axes:
            raise HarnessError(f"{item}: {axis} was given before; write its values as {axis}=value,value")
        axes[axis] = [_value(word) for word in values.split(",")]
    return axes


def _cells_of(file: Path | None, source: FromFile, axes: dict[str, list[AxisValue]]) -> list[str]:
    """One `[[include]]` per cell: the names given, or the file's, or the built-in ones; each with its open axes."""
    if file is not None and source.axis in axes:
        raise HarnessError(f"{source.axis}=…: --file {file} decides it already; give one of the two")
    lines = []
    try:
        if file is not None and (why := source.left_out(file)):
            out.print(f"note: {file}: {why}", style="yellow", markup=False, soft_wrap=True)
        for name in map(str, axes.get(source.axis) or source.names(file)):
            point: dict[str, list[AxisValue]] = {**source.open_axes(name), **axes, source.axis: [name]}
            for values in itertools.product(*point.values()):
                held = zip(point, values, strict=True)
                lines += ["[[include]]", *(f"{axis} = {json.dumps(value)}" for axis, value in held)]
    except ValueError as error:
        raise HarnessError(f"{f'--file {file}: ' if file else ''}{error}") from error
    return lines


def _value(word: str) -> AxisValue:
    """Numbers and booleans as they are, anything else as a string."""
    try:
        value = json.loads(word)
    except ValueError:
        return word
    return value if isinstance(value, int | float) else word


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


if __name__ == "__main__":
    sys.exit(guarded(app, "python -m harness.probe"))
