"""The faults, each as a cell would commit it."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing import shared_memory
from pathlib import Path

from harness.cells import Task
from harness.child import write
from harness.rows import Result
from probes.fault_drill import FaultAxes


def run(axes: FaultAxes, task: Task) -> Result:
    """Commit the fault; where it leaves the cell alive, say so in the result."""
    commit = _FAULTS.get(axes.fault)
    return (commit(task) if commit else None) or Result(facts={"fault": axes.fault, "n": axes.n})


def _raise(task: Task) -> None:
    raise RuntimeError("the drill raised this")


def _raise_multiline(task: Task) -> None:
    raise RuntimeError("first line | with a pipe\nsecond line with `ticks`, <b>markup</b> and \x1b[31mcolour")


def _exit_3(task: Task) -> None:
    os._exit(3)


def _exit_0(task: Task) -> None:
    os._exit(0)


def _segv(task: Task) -> None:
    print("about to read address 0", flush=True)
    ctypes.string_at(0)


def _segv_after(task: Task) -> None:
    write(Result(facts={"sent": True}), Path(task.result_path))
    _segv(task)


def _sigkill(task: Task) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _oom_host(task: Task) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, resource.RLIM_INFINITY))
    held = bytearray(1 << 32)
    raise AssertionError(f"{len(held)} bytes were granted beyond the limit")


def _oom_device(task: Task) -> None:
    import torch

    free, _ = torch.cuda.mem_get_info()
    torch.empty(free + (1 << 30), dtype=torch.uint8, device="cuda")


def _sleep(task: Task) -> None:
    time.sleep(3600)


def _print(task: Task) -> None:
    while True:
        print("still talking, still not finished", flush=True)


def _ignore_term(task: Task) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(3600)


def _nan(task: Task) -> Result:
    return Result(loss=(1.0, float("nan"), float("inf")), facts={"worst": float("-inf")})


def _huge_result(task: Task) -> Result:
    return Result(notes=("x" * (64 << 20),))


def _fork(task: Task) -> None:
    """A child in the same group that outlives the cell."""
    if os.fork() == 0:
        time.sleep(3600)
        os._exit(0)


def _daemon(task: Task) -> None:
    """A grandchild in a session of its own: no group signal reaches it."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(3600)
        os._exit(0)
    os.wait()


def _shared_memory(task: Task) -> None:
    """Killed while it holds a segment that only it would have unlinked."""
    shared_memory.SharedMemory(create=True, size=1 << 20)
    os.killpg(0, signal.SIGKILL)


def _garbage_result(task: Task) -> None:
    Path(task.result_path).write_text('{"status": "ok", "loss": [1.0,')
    sys.stdout.flush()
    os._exit(0)


_FAULTS: dict[str, Callable[[Task], Result | None]] = {
    "raise": _raise,
    "raise-multiline": _raise_multiline,
    "exit-3": _exit_3,
    "exit-0": _exit_0,
    "segv-before": _segv,
    "segv-after": _segv_after,
    "sigkill": _sigkill,
    "oom-host": _oom_host,
    "oom-device": _oom_device,
    "sleep": _sleep,
    "print": _print,
    "ignore-term": _ignore_term,
    "nan": _nan,
    "huge-result": _huge_result,
    "fork": _fork,
    "daemon": _daemon,
    "shared-memory": _shared_memory,
    "garbage-result": _garbage_result,
}
