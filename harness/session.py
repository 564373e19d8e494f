"""One execution of a suite, from its name to its rows: what `python -m harness run` does."""

from __future__ import annotations

import datetime
import os
import sys
import time
from pathlib import Path

import msgspec
from rich.console import Console

from harness import devices, environ, fingerprint, progress, torchrun
from harness.cells import Cell, Device
from harness.errors import HarnessError
from harness.interrupts import Interrupts
from harness.isolate import Launcher
from harness.resume import standing
from harness.rows import Row
from harness.runner import Interrupted, Plan, Runner
from harness.store import Folder, RunFile
from harness.suite import Suite

LOCAL = Path("results/local")


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The choices of one run."""

    out: Path | None = None
    devices: str | None = None
    jobs: int = 1
    isolation: str = "forkserver"
    fresh: bool = False
    retry: bool = False
    shard: str = ""
    launcher: str = ""  # "torchrun …", for probes of several ranks


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a run came to."""

    folder: Path
    counts: dict[str, int]
    unexpected: int
    interrupted: bool
    cells: int

    @property
    def exit_code(self) -> int:
        """0 as expected; 1 a row that the suite does not expect; 130 interrupted."""
        if self.interrupted:
            return 130
        return 1 if self.unexpected else 0


def execute(suite: Suite, options: Options, console: Console) -> Outcome:
    """Run every cell of the suite that has no valid row yet. Raises HarnessError for wrong input."""
    path = options.out or LOCAL / (
        suite.name + (f".{options.shard.replace('/', '-of-')}" if options.shard else "")
    )
    _check_text(path)
    nodes = _nodes(suite, options.launcher)
    if options.fresh:
        _set_aside(path, console)
    with Interrupts() as interrupts, Folder(path) as folder:
        run, environment = _run_file(folder, suite)
        digests = fingerprint.digests(environment)
        key = digests["stack"][:6] + digests["device"][:6] + digests["host"][:6] + digests["code"][:6]
        run.environments[key] = environment
        ids, why = _devices(suite.file.device, options.devices)
        stands = standing(folder, suite, digests, retry=options.retry, no_device=bool(why))
        done = stands.rows
        plan = Plan(
            suite=suite,
            cells=tuple(cell for cell in suite.cells if cell.id not in done),
            devices=ids,
            jobs=options.jobs,
            launcher=options.launcher,
            nodes=nodes,
            no_device=why,
            environment=key,
            fingerprint=digests,
        )
        if options.jobs > 1 and suite.probe.timed:
            run.notes.append(
                f"--jobs {options.jobs} had no effect: cells of {suite.probe.name} are timed, and run alone"
            )
        for line in folder.set_aside + list(suite.warnings) + run.notes:
            console.print(f"note: {line}", style="yellow", highlight=False, markup=False, soft_wrap=True)
        run.cells = len(suite.cells) + stands.elsewhere
        return _run(plan, folder, run, done, options, console, interrupts)


def _run(
    plan: Plan,
    folder: Folder,
    run: RunFile,
    done: dict[str, Row],
    options: Options,
    console: Console,
    interrupts: Interrupts,
) -> Outcome:
    suite = plan.suite
    folder.write_run(run)
    if done:
        console.print(
            f"resuming {folder.path}: {len(done)} of {len(suite.cells)} cells have their row already",
            markup=False,
            soft_wrap=True,
        )
    tally = _Tally(done)
    launcher = Launcher(folder.path, options.isolation)
    interrupted = False
    watch = progress.Watch(
        console, len(suite.cells), len(done), varying(suite.cells), lambda cell: estimate_s(suite, cell)
    )
    watch.expect(sum(estimate_s(suite, cell) for cell in plan.cells if not cell.skip and not plan.no_device))
    try:
        with watch:
            Runner(plan, folder, launcher, _Both(watch, tally), interrupts).run()
    except Interrupted:
        interrupted = True
    finally:
        run.prepared = {**run.prepared, **launcher.prepared}
        launcher.close()
    run.interrupted = interrupted
    run.finished_at = _now()
    folder.write_run(run)
    return Outcome(
        folder=folder.path,
        counts=tally.counts,
        unexpected=tally.unexpected,
        interrupted=interrupted,
        cells=len(suite.cells),
    )


class _Tally:
    def __init__(self, done: dict[str, Row]) -> None:
        self.counts: dict[str, int] = {}
        self.unexpected = 0
        for row in done.values():
            self.add(row)

    def add(self, row: Row) -> None:
        self.counts[row.status] = self.counts.get(row.status, 0) + 1
        self.unexpected += not row.expected


class _Both:
    """Progress for the eye and for the exit code."""

    def __init__(self, watch: progress.Watch, tally: _Tally) -> None:
        self.started = watch.started
        self.tick = watch.tick
        self._watch, self._tally = watch, tally

    def ended(self, cell: Cell, row: Row) -> None:
        self._tally.add(row)
        self._watch.ended(cell, row)


def varying(cells: tuple[Cell, ...]) -> tuple[str, ...]:
    """The axes with more than one value, in the probe's order."""
    if not cells:
        return ()
    first = cells[0].axes
    return tuple(axis for axis in first if any(cell.axes[axis] != first[axis] for cell in cells))


def estimate_s(suite: Suite, cell: Cell) -> float:
    """The probe's guess for one cell."""
    axes = msgspec.convert(cell.axes, suite.probe.axes)
    return suite.probe.estimate_s(axes, cell.device, suite.file.measure)


def _run_file(folder: Folder, suite: Suite) -> tuple[RunFile, dict[str, dict[str, object]]]:
    run = folder.read_run()
    if run is not None and (run.probe, run.device) != (suite.probe.name, suite.file.device):
        raise HarnessError(
            f"{folder.path}: holds a run of probe {run.probe!r} on {run.device}; "
            f"this is {suite.probe.name!r} on {suite.file.device}. Choose another --out, or --fresh"
        )
    run = run or RunFile(suite="", title="", probe="", device="", command=[], started_at=_now())
    run.suite, run.title = suite.name, suite.file.title
    run.probe, run.device = suite.probe.name, suite.file.device
    run.command = ["python", "-m", "harness", *sys.argv[1:]]
    run.suite_toml, run.baseline, run.finished_at = suite.text, dict(suite.file.baseline), ""
    scrubbed = environ.scrubbed(os.environ)
    run.notes = [f"behaviour flags of the caller, not passed on: {', '.join(scrubbed)}"] if scrubbed else []
    return run, fingerprint.environment(suite.file.device, suite.probe)


def _devices(device: Device, selection: str | None) -> tuple[tuple[str, ...], str]:
    if device == "cpu":
        if selection is not None:
            raise HarnessError(f"--devices {selection}: names GPUs, and this suite is for the CPU")
        return ("cpu",), ""
    ids, why = devices.cuda_ids()
    return devices.pick(ids, selection), why


def _nodes(suite: Suite, launcher: str) -> int:
    """Hosts that share a cell. Raises HarnessError for a launcher that is none, or where there is nothing to launch."""
    if not launcher:
        return 1
    torchrun.options(launcher)
    if not suite.probe.ranks:
        raise HarnessError(f"--launcher {launcher}: cells of {suite.probe.name} are one process each")
    return torchrun.nodes(launcher)


def _check_text(path: Path) -> None:
    try:
        str(path).encode()
    except UnicodeEncodeError as error:  # run.json and the rows' environment name it
        raise HarnessError(f"--out {str(path)!a}: is not UTF-8") from error


def _set_aside(path: Path, console: Console) -> None:
    if not path.exists():
        return
    path = path.resolve()  # "." has no name of its own
    with Folder(path):  # raises when the run is in use, and for a folder that is no run
        target = path.with_name(f"{path.name}.{time.strftime('%Y%m%d-%H%M%S')}")
        while target.exists():
            target = target.with_name(f"{target.name}+")
        try:
            path.rename(target)
        except OSError as error:
            raise HarnessError(f"{path}: cannot be kept as {target}: {error.strerror}") from error
    console.print(f"the earlier run is kept in {target}", markup=False, highlight=False, soft_wrap=True)


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
