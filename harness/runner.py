"""Runs a suite's cells, each in its own process, and writes exactly one row for each.

One thread, one loop: start what fits, sleep until a process speaks or a deadline passes, write the row.
"""

from __future__ import annotations

import collections
import datetime
import signal
import time
from pathlib import Path
from typing import Protocol

import msgspec

from harness import environ, outcome
from harness.cells import Cell, Task
from harness.interrupts import Interrupts
from harness.isolate import Kind, Launched, Launcher, Lost
from harness.rows import Isolation, Result, Row
from harness.running import Running
from harness.store import Folder
from harness.suite import Suite
from harness.wire import Ended

_TICK_S = 1.0  # for the progress line and for logs that grow without end
_AFTER_KILL_S = 10.0
_STALE = "exit 75"


class Progress(Protocol):
    """What the runner tells whoever watches."""

    def started(self, cell: Cell) -> None: ...
    def ended(self, cell: Cell, row: Row) -> None: ...
    def tick(self) -> None: ...


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to run, and with what; decided before the first process starts."""

    suite: Suite
    cells: tuple[Cell, ...]  # without those that have a valid row already
    devices: tuple[str, ...]  # ids for CUDA_VISIBLE_DEVICES; ("cpu",) on a CPU
    jobs: int = 1
    launcher: str = ""  # what starts the ranks of a cell; "": its own process
    nodes: int = 1  # hosts that share a cell's ranks
    no_device: str = ""  # why the suite's device is not here: every cell is a skip with this reason
    environment: str = ""
    fingerprint: dict[str, str] = {}


class Interrupted(Exception):
    """The user ended the run; every finished row is kept."""


class Runner:
    """One execution of a plan. Call `run` once."""

    def __init__(
        self, plan: Plan, folder: Folder, launcher: Launcher, progress: Progress, interrupts: Interrupts
    ) -> None:
        self._plan = plan
        self._folder = folder
        self._launcher = launcher
        self._progress = progress
        self._pending = collections.deque(plan.cells)
        self._running: dict[str, Running] = {}
        self._free = list(plan.devices)
        self._interrupts = interrupts
        self._kind = _kind(plan)

    def run(self) -> None:
        """Every cell gets its row. Raises Interrupted after a signal; the launcher's cells may still run."""
        while self._pending or self._running:
            self._start_what_fits()
            for event in self._launcher.wait(self._next_wake()):
                self._hear(event)
            self._enforce_deadlines()
            self._progress.tick()
            if self._interrupts.asked:
                raise Interrupted

    def _start_what_fits(self) -> None:
        while self._pending and not self._interrupts.asked:
            cell = self._pending[0]
            if why := self._why_not(cell):
                self._pending.popleft()
                self._write(cell, Result(status="skipped", reason=why), Isolation())
            elif self._fits(cell):
                self._pending.popleft()
                self._start(cell)
            else:
                return

    def _why_not(self, cell: Cell) -> str:
        if cell.skip:
            return cell.skip
        if self._plan.no_device:
            return self._plan.no_device
        if self._claim(cell) > len(self._plan.devices):
            hosts = f" on each of {self._plan.nodes} nodes" if self._plan.nodes > 1 else ""
            return f"needs {self._claim(cell)} devices{hosts}; {len(self._plan.devices)} here"
        return ""

    def _claim(self, cell: Cell) -> int:
        """Devices of this host that the cell takes."""
        return -(-cell.devices // self._plan.nodes)

    def _fits(self, cell: Cell) -> bool:
        """In order, so that a cell of many devices is not passed over for ever by small ones."""
        if cell.device == "cuda":
            return self._claim(cell) <= len(self._free)
        if self._plan.suite.probe.timed:  # on a CPU the device is the machine: timed cells run alone
            return not self._running
        return len(self._running) < self._plan.jobs

    def _start(self, cell: Cell) -> None:
        devices: tuple[str, ...] = ()
        if cell.device == "cuda":
            devices = tuple(self._free[: self._claim(cell)])
            del self._free[: len(devices)]
        caches = self._caches(cell)
        cache = self._plan.suite.file.measure.cache + (
            ", empty at first" if caches and not caches.exists() else ""
        )
        task = self._task(cell, devices)
        running = Running(
            cell=cell,
            task=task,
            devices=devices,
            cache=cache,
            neighbours=set(self._running),
            asked_at=time.monotonic(),
            started_at=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds"),
            oom_kills=outcome.oom_kills(),
        )
        for other in self._running.values():
            other.neighbours.add(task.id)
        self._running[task.id] = running
        self._launcher.start(task, self._kind)
        self._progress.started(cell)

    def _task(self, cell: Cell, devices: tuple[str, ...]) -> Task:
        file = self._plan.suite.file
        folder = self._launcher.cell_folder()
        caches = self._caches(cell) or folder
        env = {
            "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
            "TRITON_CACHE_DIR": str(caches / "triton"),
            "TMPDIR": str(folder / "t"),
            **({"CUDA_VISIBLE_DEVICES": ",".join(devices)} if devices else {}),
            **environ.late(file.env),
        }
        return Task(
            id=cell.id,
            work=self._plan.suite.probe.work,
            axes=cell.axes,
            device=cell.device,
            measure=file.measure,
            seed=file.seed + cell.replicate,
            folder=str(folder),
            result_path=str(folder / "result.json"),
            log_path=str(self._folder.logs / f"{cell.id}.log"),
            env=env,
            launcher=self._plan.launcher,
        )

    def _caches(self, cell: Cell) -> Path | None:
        """Where compile caches outlive the cell; None for cold ones."""
        kept = {"warm": cell.hash, "shared": "shared"}.get(self._plan.suite.file.measure.cache)
        return self._folder.path / "caches" / kept if kept else None

    def _next_wake(self) -> float:
        nearest = min((r.deadline for r in self._running.values()), default=float("inf"))
        return min(_TICK_S, nearest - time.monotonic()) if self._running else 0.0

    def _hear(self, event: Launched | Ended | Lost) -> None:
        running = self._running.get(event.id)
        if running is None:
            return
        if isinstance(event, Launched):
            running.launched = event
            running.deadline = time.monotonic() + running.task.measure.timeout_s
        elif isinstance(event, Lost):
            self._finish(
                running, Result(status="timeout" if running.signals else "crashed", reason=event.reason), None
            )
        elif event.exit == _STALE and not running.signals and _forked(running):
            why = (outcome.log_tail(running.log) or ("the fork was not fresh",))[-1]
            self._launcher.start(running.task, self._kind, why)
        else:
            result = outcome.judge(
                running.task,
                event.exit,
                timed_out=bool(running.signals),
                oom_kills=outcome.oom_kills() - running.oom_kills,
            )
            self._finish(running, result, event)

    def _enforce_deadlines(self) -> None:
        now = time.monotonic()
        for id, running in self._running.items():
            outcome.cap_log(running.log)
            if now < running.deadline:
                continue
            running.signals += 1
            if running.signals == 1:
                self._launcher.kill(id, signal.SIGTERM)
                running.deadline = now + running.task.measure.grace_s
            elif running.signals == 2:
                self._launcher.kill(id, signal.SIGKILL)
                running.deadline = now + _AFTER_KILL_S
            else:
                self._launcher.abandon(id)
                running.deadline = float("inf")

    def _finish(self, running: Running, result: Result, ended: Ended | None) -> None:
        del self._running[running.task.id]
        self._free += running.devices
        if ended and result.memory.host_peak_bytes is None:
            memory = msgspec.structs.replace(result.memory, host_peak_bytes=ended.max_rss_bytes)
            result = msgspec.structs.replace(result, memory=memory)
        isolation = running.isolation(ended, self._plan.suite.file.env)
        wall_s = time.monotonic() - running.asked_at
        self._write(running.cell, result, isolation, running.started_at, wall_s, running.log)
        running.discard()

    def _write(
        self,
        cell: Cell,
        result: Result,
        isolation: Isolation,
        started_at: str = "",
        wall_s: float | None = None,
        log: Path | None = None,
    ) -> None:
        plan = self._plan
        row = Row(
            **msgspec.structs.asdict(result),
            suite=plan.suite.name,
            probe=cell.probe,
            cell=cell.hash,
            replicate=cell.replicate,
            device=cell.device,
            axes=cell.axes,
            measure=msgspec.to_builtins(plan.suite.file.measure),
            seed=plan.suite.file.seed + cell.replicate,
            expected=expected(cell, result),
            environment=plan.environment,
            fingerprint=plan.fingerprint,
            started_at=started_at,
            wall_s=wall_s,
            isolation=isolation,
            log_tail=() if result.status in ("ok", "skipped") or log is None else outcome.log_tail(log),
        )
        self._folder.write(row)
        self._progress.ended(cell, row)


def _forked(running: Running) -> bool:
    """Whether it ran as a fork: a cold cell that exits with the stale code means something of its own."""
    return running.launched is not None and running.launched.method == "forkserver"


def expected(cell: Cell, result: Result) -> bool:
    """Whether the suite counts on such an end."""
    verdict_fits = result.verdict is None or result.verdict in cell.expect_verdict
    return result.status in (*cell.expect_status, "skipped") and verdict_fits


def _kind(plan: Plan) -> Kind:
    probe = plan.suite.probe
    needs = any(
        probe.needs_prepare(msgspec.convert(c.axes, probe.axes), c.device) for c in plan.cells if not c.skip
    )
    return Kind(
        preload=probe.preload,
        prepare=probe.prepare if needs and not plan.no_device else "",
        env=tuple(sorted(environ.early(plan.suite.file.env).items())),
    )
