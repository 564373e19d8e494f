"""The server a runner forks cells from: one process per environment, single-threaded, without CUDA.

    python -m harness.server FD     (started by harness.isolate; FD is one end of a socket pair)

It imports what its cells need once, then forks a child for each: a cell starts in milliseconds with fresh
Dynamo, Inductor and CUDA state. The standard library's forkserver does not serve here: it keeps one server
per process, loses the exit status's signal and resource use, ignores preloads that fail, and its children
survive the runner. This one also reaps: it is the subreaper of its cells, so nothing a cell starts outlives
the cell, and when the runner dies (end of file on the socket) it kills every cell and goes.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import select
import shutil
import signal
import socket
import sys
import time
import warnings
from pathlib import Path

from harness import shm
from harness.cells import Task
from harness.wire import Ended, Kill, Line, Ready, Start, Started

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def main(argv: list[str]) -> int:
    """FD, scratch root, preload modules joined by commas, prepare function, prepare folder."""
    fd, scratch, preload, prepare, folder = argv
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the runner's to handle
    # The other threads are a BLAS library's idle workers, which it stops and restarts around a fork itself.
    warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    line = Line(socket.socket(fileno=int(fd)))
    server = _Server(line, Path(scratch))
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)  # while it prepares, nobody reads the line's end of file
    try:
        line.send(_preload([m for m in preload.split(",") if m], prepare, folder))
        server.serve()
    except (EOFError, OSError):
        server.clear()
    return 0


def _preload(modules: list[str], prepare: str, folder: str) -> Ready:
    began = time.monotonic()
    failed: dict[str, str] = {}
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:  # whatever a module raises on import is this module's failure alone
            failed[module] = f"{type(error).__name__}: {error}"
    prepared = {}
    if prepare:
        try:
            prepared = _call(prepare, folder)
        except Exception as error:  # cells still run, only slower; the row of facts says so
            failed[prepare] = f"{type(error).__name__}: {error}"
    gc.collect()
    gc.freeze()  # a collection in a child must not touch, and so copy, the server's pages
    return Ready(
        pid=os.getpid(),
        preloaded=tuple(m for m in modules if m in sys.modules),
        failed=failed,
        prepared=prepared,
        poisoned=poisoned(),
        seconds=time.monotonic() - began,
    )


def _call(name: str, folder: str) -> dict[str, float]:
    module, _, function = name.partition(":")
    result: dict[str, float] = getattr(importlib.import_module(module), function)(folder)
    return result


def poisoned() -> str:
    """Why a fork of this process would not be fresh, or "". Cheap: asked in every child too."""
    torch = sys.modules.get("torch")
    if torch is not None:
        if torch.cuda.is_initialized():
            return "CUDA is initialised in the server"
        if torch.cuda._is_in_bad_fork():
            return "CUDA was initialised before the fork"
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    if counters and any(counters.values()):
        return f"Dynamo has compiled in the server: {dict(counters)}"
    return ""


class _Server:
    def __init__(self, line: Line, scratch: Path) -> None:
        self._line = line
        self._scratch = scratch
        self._cells: dict[int, str] = {}
        self._shm = shm.segments()
        self._wake, wake_write = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(wake_write, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, lambda *_: self._leave())

    def serve(self) -> None:
        while True:
            readable = select.select([self._line.fileno(), self._wake], [], [])[0]
            if self._wake in readable:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake, 4096)
                self._reap()
            if self._line.fileno() in readable:
                for request in self._line.requests():
                    self._obey(request)

    def clear(self) -> None:
        """Kill every cell and whatever its processes left behind, and remove what they wrote for themselves."""
        for pid in self._cells:
            _kill_group(pid)
        self._cells.clear()
        _kill_strays(set())
        shm.sweep(self._shm)
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _leave(self) -> None:
        self.clear()
        os._exit(0)

    def _obey(self, request: Start | Kill) -> None:
        if isinstance(request, Start):
            pid = _fork(request, self._line)
            self._cells[pid] = request.task.id
            self._line.send(Started(id=request.task.id, pid=pid))
            return
        for pid, cell in self._cells.items():
            if cell == request.id:  # still unreaped, so the number is still this cell's
                _kill_group(pid, request.signal)

    def _reap(self) -> None:
        while (info := _waitable()) is not None:
            pid = info.si_pid
            if pid in self._cells:
                _kill_group(pid)  # while the zombie leader still holds the group's number
            _, status, usage = os.wait4(pid, 0)
            if pid not in self._cells:
                continue
            cell = self._cells.pop(pid)
            ended = Ended(
                id=cell,
                exit=_exit_word(status),
                cpu_s=usage.ru_utime + usage.ru_stime,
                max_rss_bytes=usage.ru_maxrss * 1024,
                killed_strays=_kill_strays(set(self._cells)),
            )
            shm.sweep(self._shm)
            self._line.send(ended)


def _waitable() -> os.waitid_result | None:
    try:
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None


def _exit_word(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exit {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _kill_group(pid: int, sig: int = signal.SIGKILL) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, sig)


def _kill_strays(leaders: set[int]) -> int:
    """Kill children that lead no running cell: processes that left their cell's group, orphaned to us."""
    killed = 0
    for _ in range(50):  # killing one hands us its children
        strays = [pid for pid in _children() if pid not in leaders]
        if not strays:
            break
        for pid in strays:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                status = os.waitpid(pid, 0)[1]
                killed += os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    return killed


def _children() -> list[int]:
    path = Path(f"/proc/self/task/{os.getpid()}/children")  # the server has one thread
    return [int(pid) for pid in path.read_text().split()] if path.exists() else []


def _fork(request: Start, line: Line) -> int:
    server = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        line.close()
        _become_cell(request.task, server)
        if request.cold:
            _exec_cold(request.task)
        from harness import child

        code = child.main(request.task)
    finally:  # never back into the server's loop, whatever was raised
        os._exit(code)


def _become_cell(task: Task, server: int) -> None:
    """Own session and group, default signals, output to the log, the cell's variables."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    os.setsid()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:  # it died before the line above
        os._exit(70)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # the kernel shall take the cell, not the runner
    log = os.open(task.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(task.env)


def _exec_cold(task: Task) -> None:
    import msgspec

    path = Path(task.folder) / "task.json"
    path.write_bytes(msgspec.json.encode(task))
    os.execv(sys.executable, [sys.executable, "-m", "harness.child", str(path)])


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
