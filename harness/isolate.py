"""Starts cells in processes of their own and says what became of them. The runner's side of `harness.server`.

Nothing here waits in a loop: `Launcher.wait` sleeps on the servers' sockets until one speaks.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Literal

import msgspec

from harness import environ
from harness.cells import Task
from harness.errors import HarnessError
from harness.wire import Ended, Kill, Line, Ready, Start, Started

ROOT = Path(__file__).resolve().parent.parent
_READY_WITHIN_S = 600.0
# A Unix socket's path holds 107 bytes, and libraries put sockets below TMPDIR.
_LONGEST_SCRATCH = 50


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """What decides which server a cell is forked from."""

    preload: tuple[str, ...] = ()
    prepare: str = ""
    env: tuple[tuple[str, str], ...] = ()  # the suite's variables that are read at import


class Lost(msgspec.Struct, frozen=True, kw_only=True):
    """The server died, and this cell with it."""

    id: str
    reason: str


class Launched(msgspec.Struct, frozen=True, kw_only=True):
    """The cell's process exists. Its deadline counts from here."""

    id: str
    pid: int
    method: Literal["forkserver", "spawn"]
    reason: str = ""  # why not the method asked for


class _Server:
    """One server process, the cells sent to it, and those that wait until it is ready."""

    def __init__(
        self, kind: Kind, env: Mapping[str, str], scratch: Path, shared: Path, log: IO[bytes]
    ) -> None:
        ours, theirs = socket.socketpair()
        arguments = [str(theirs.fileno()), str(scratch), ",".join(kind.preload), kind.prepare, str(shared)]
        self.kind = kind
        self.ready: Ready | None = None
        self.waiting: list[Task] = []
        self.sent: dict[str, Launched | None] = {}
        self.ready_by = time.monotonic() + _READY_WITHIN_S
        self.process = subprocess.Popen(
            [sys.executable, "-m", "harness.server", *arguments],
            env=dict(env),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # the terminal's Ctrl-C goes to the runner alone
        )
        theirs.close()
        self.line = Line(ours)

    def why_cold(self) -> str:
        """Why this server's forks would not be as asked; "" when they are."""
        if self.ready is None:
            return ""
        broken = [f"preload of {name} failed: {why}" for name, why in self.ready.failed.items()]
        return "; ".join([self.ready.poisoned, *broken] if self.ready.poisoned else broken)

    def cells(self) -> list[str]:
        return [task.id for task in self.waiting] + list(self.sent)


class Launcher:
    """Runs cells apart from each other.

    folder: the run's folder; scratch space and the servers' logs lie in it.
    isolation: "forkserver" or "spawn" (a cold Python for each cell).
    caller: the environment to start from; behaviour flags in it do not reach a cell.
    """

    def __init__(
        self, folder: Path, isolation: str = "forkserver", caller: Mapping[str, str] = os.environ
    ) -> None:
        self._folder = folder
        self.isolation = isolation
        self._caller = caller
        self._servers: dict[Kind, _Server] = {}
        self._selector = selectors.DefaultSelector()
        self._reasons: dict[str, str] = {}  # cold cells -> why, or "" where it was asked for
        self._count = 0
        self.prepared: dict[str, float] = {}
        self.scratch = _scratch(folder)
        self.shared = self.scratch / "shared"
        self.shared.mkdir(parents=True, exist_ok=True)

    def cell_folder(self) -> Path:
        """A new empty folder for one cell's temporary files and cold caches."""
        self._count += 1
        folder = self.scratch / str(self._count)
        (folder / "t").mkdir(parents=True)
        return folder

    def start(self, task: Task, kind: Kind, cold_reason: str = "") -> None:
        """Start the cell; `Launched` comes from `wait` once its process exists.

        A reason asks for a cold process whatever the isolation, and ends up in the row.
        """
        cold = bool(cold_reason) or self.isolation == "spawn"
        server = self._server(Kind(env=kind.env) if cold else kind)
        if cold:
            task = msgspec.structs.replace(task, check_fresh=False)
            self._reasons[task.id] = cold_reason
        server.waiting.append(task)
        if server.ready is not None:
            self._flush(server)

    def kill(self, id: str, sig: int) -> None:
        """Signal the cell's whole process group."""
        for server in self._servers.values():
            if id in server.sent:
                _try_send(server, Kill(id=id, signal=sig))

    def abandon(self, id: str) -> None:
        """Kill the server of a cell that did not end after KILL; `wait` reports its cells as lost."""
        for server in self._servers.values():
            if id in server.sent:
                _kill_server(server)

    def wait(self, timeout_s: float) -> list[Launched | Ended | Lost]:
        """Sleep until something happened, `timeout_s` at most."""
        happened: list[Launched | Ended | Lost] = []
        for key, _ in self._selector.select(max(0.0, timeout_s)):
            server: _Server = key.data
            try:
                for event in server.line.events():
                    happened += self._heard(server, event)
            except EOFError:
                happened += self._bury(server)
        for server in list(self._servers.values()):
            if server.ready is None and time.monotonic() > server.ready_by:
                _kill_server(server)
        return happened

    def close(self) -> None:
        """End every server and cell, and remove what they wrote for themselves."""
        for server in self._servers.values():
            server.line.close()  # end of file: the server kills its cells and goes
        for server in self._servers.values():
            try:
                server.process.wait(5)
            except subprocess.TimeoutExpired:
                _kill_server(server)
                server.process.wait()
        self._servers.clear()
        self._selector.close()
        _unlock(self.shared)
        shutil.rmtree(self.scratch, ignore_errors=True)
        with contextlib.suppress(OSError):  # the folder of all runners' scratch, if it is there and empty
            (self._folder / "scratch").rmdir()

    def _server(self, kind: Kind) -> _Server:
        if kind not in self._servers:
            logs = self._folder / "logs"
            logs.mkdir(exist_ok=True)
            env = environ.server_env(self._caller, dict(kind.env))
            env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH", "")]))
            # fixed at import: where Inductor's precompiled header and the results of its probing go
            env["TMPDIR"] = env["TORCHINDUCTOR_CACHE_DIR"] = str(self.shared)
            with (logs / f"server-{len(self._servers)}.log").open("ab") as log:
                server = _Server(kind, env, self.scratch, self.shared, log)
            self._servers[kind] = server
            self._selector.register(server.line, selectors.EVENT_READ, server)
        return self._servers[kind]

    def _heard(self, server: _Server, event: object) -> list[Launched | Ended | Lost]:
        match event:
            case Ready():
                server.ready = event
                self.prepared.update(event.prepared)
                self._flush(server)
            case Started(id=id, pid=pid):
                cold = id in self._reasons
                launched = Launched(
                    id=id,
                    pid=pid,
                    method="spawn" if cold else "forkserver",
                    reason=self._reasons.get(id, ""),
                )
                server.sent[id] = launched
                return [launched]
            case Ended(id=id):
                server.sent.pop(id, None)
                self._reasons.pop(id, None)
                return [event]
        return []

    def _flush(self, server: _Server) -> None:
        why = server.why_cold()
        waiting, server.waiting = server.waiting, []
        for task in waiting:
            if why and task.check_fresh:
                self.start(task, server.kind, why)
                continue
            server.sent[task.id] = None
            _try_send(server, Start(task=task, cold=task.id in self._reasons))

    def _bury(self, server: _Server) -> list[Launched | Ended | Lost]:
        self._selector.unregister(server.line)
        server.line.close()
        self._servers.pop(server.kind)
        code = server.process.wait()
        word = signal.Signals(-code).name if code < 0 else f"exit {code}"
        return [Lost(id=id, reason=f"the fork server died ({word})") for id in server.cells()]


def _try_send(server: _Server, message: Start | Kill) -> None:
    with contextlib.suppress(OSError):  # it is dead: `wait` sees the end of file and reports its cells
        server.line.send(message)


def _kill_server(server: _Server) -> None:
    """Kill the server and the compilers it started; its cells die with it (parent-death signal)."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.process.pid, signal.SIGKILL)


def _scratch(folder: Path) -> Path:
    """An empty scratch root: in the run's folder, or where that path is too long, in the system's."""
    base = folder.resolve() / "scratch"
    for left in base.glob("*/shared"):
        _unlock(left)
    shutil.rmtree(base, ignore_errors=True)  # of a runner that was killed; the lock is ours now
    # Its server may still be finishing, and then removes its own: names are never shared.
    inside = base / f"{os.getpid():x}"
    if len(str(inside)) <= _LONGEST_SCRATCH:
        return inside
    try:
        return Path(tempfile.mkdtemp(prefix="cells-"))
    except OSError as error:
        raise HarnessError(f"no folder for temporary files: {error}") from error


def _unlock(folder: Path) -> None:
    """Make a read-only folder removable again."""
    for path in [folder, *folder.rglob("*")]:
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o755)
