"""One execution of a suite, from its name to its rows: what `python -m harness run` does."""

from __future__ import annotations

import datetime
import os
import sys
import time
from pathlib import Path

import msgspec
from rich.console import Console

from harness import devices, environ, fingerprint, progress
from harness.cells import Cell, Device
from harness.errors import HarnessError
from harness.isolate import Launcher
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
    if options.fresh:
        _set_aside(path, console)
    with Folder(path) as folder:
        run, environment = _run_file(folder, suite)
        digests = fingerprint.digests(environment)
        key = digests["stack"][:6] + digests["device"][:6] + digests["host"][:6] + digests["code"][:6]
        run.environments[key] = environment
        ids, why = _devices(suite.file.device, options.devices)
        done = _done(folder, suite, digests, options.retry, why)
        plan = Plan(
            suite=suite,
            cells=tuple(cell for cell in suite.cells if cell.id not in done),
            devices=ids,
            jobs=options.jobs,
            no_device=why,
            environment=key,
            fingerprint=digests,
        )
        if options.jobs > 1 and suite.probe.timed:
            run.notes.append(
                f"--jobs {options.jobs} had no effect: cells of {suite.probe.name} are timed, and run alone"
            )
        for line in folder.set_aside + list(suite.warnings) + run.notes:
            console.print(f"note: {line}", style="yellow", highlight=False, soft_wrap=True)
        return _run(plan, folder, run, done, options, console)


def _run(
    plan: Plan, folder: Folder, run: RunFile, done: dict[str, Row], options: Options, console: Console
) -> Outcome:
    suite = plan.suite
    folder.write_run(run)
    if done:
        console.print(
            f"resuming {folder.path}: {len(done)} of {len(suite.cells)} cells have their row already"
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
            Runner(plan, folder, launcher, _Both(watch, tally)).run()
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
    run.cells, run.suite_toml = len(suite.cells), suite.text
    run.baseline, run.finished_at = dict(suite.file.baseline), ""
    scrubbed = environ.scrubbed(os.environ)
    run.notes = [f"behaviour flags of the caller, not passed on: {', '.join(scrubbed)}"] if scrubbed else []
    return run, fingerprint.environment(suite.file.device, suite.probe)


def _done(
    folder: Folder, suite: Suite, digests: dict[str, str], retry: bool, no_device: str
) -> dict[str, Row]:
    """Rows that stand: of a cell of this suite, with the same stack, device and code.

    A row that does not stand is replaced when its cell is measured again. Rows of cells that the suite,
    before --only and --shard, does not have are set aside: the folder holds one run of one suite.
    """
    wanted = {cell.id: cell for cell in suite.cells}
    others = {cell.id for cell in suite.whole}
    done: dict[str, Row] = {}
    for row in folder.read():
        id = f"{row.cell}.r{row.replicate}"
        if id in wanted and (
            _stands(row, wanted[id], digests, retry) or (no_device and row.status != "skipped")
        ):
            done[id] = row  # without its device a cell can only be skipped: what was measured stays
        elif id not in wanted and id not in others:
            folder.put_aside(row, "is of a cell that the suite no longer has")
    return done


def _stands(row: Row, cell: Cell, digests: dict[str, str], retry: bool) -> bool:
    if retry and row.status in ("crashed", "timeout", "error"):
        return False
    if (row.status == "skipped") != bool(cell.skip):
        return False  # skips cost nothing: decided anew, their reasons may have changed
    return all(row.fingerprint.get(part) == digests[part] for part in fingerprint.RESUME_PARTS)


def _devices(device: Device, selection: str | None) -> tuple[tuple[str, ...], str]:
    if device == "cpu":
        if selection is not None:
            raise HarnessError(f"--devices {selection}: names GPUs, and this suite is for the CPU")
        return ("cpu",), ""
    ids, why = devices.cuda_ids()
    return devices.pick(ids, selection), why


def _set_aside(path: Path, console: Console) -> None:
    if not path.exists():
        return
    with Folder(path):  # raises when the run is in use
        target = path.with_name(f"{path.name}.{time.strftime('%Y%m%d-%H%M%S')}")
        while target.exists():
            target = target.with_name(f"{target.name}+")
        path.rename(target)
    console.print(f"the earlier run is kept in {target}")


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
