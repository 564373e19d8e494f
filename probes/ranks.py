"""N ranks of one host as one cell: forks of the cell's own process, in its group, under its deadline.

The rendezvous is a file in the cell's folder, so no port is taken and none has to be freed. A rank that is lost ends
the cell at once and by name, instead of leaving the others to wait for it.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist

from harness.cells import Task
from harness.rows import Result

_FAILED = 1


class OverBackend(Protocol):
    """Axes that know what moves their tensors."""

    def backend_on(self, device: str) -> str:
        """nccl or gloo."""


class RankLost(RuntimeError):
    """A rank ended without a result: which, and how."""


@dataclass(frozen=True)
class Failure:
    """A rank's exception, in words that a row may hold."""

    rank: int
    error: str
    out_of_memory: bool


def run(
    work: Callable[..., Any],
    size: int,
    args: tuple[Any, ...],
    *,
    folder: Path,
    backend: str,
    timeout_s: float,
) -> list[Any] | Failure:
    """work(rank, *args) on `size` ranks of one process group; what each returned (anything torch.save takes).

    The caller has used no device, and no tensor operation that keeps threads: its forks would inherit them.
    The first rank whose work raises is the Failure; the others are ended. Raises RankLost for one that was killed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    ranks = {_fork(work, rank, size, args, folder, backend, timeout_s): rank for rank in range(size)}
    try:
        while ranks:
            pid, status = os.wait()
            if pid not in ranks:
                continue
            rank, code = ranks.pop(pid), os.waitstatus_to_exitcode(status)
            if code == _FAILED:
                return Failure(**torch.load(folder / f"failed-{rank}.pt", weights_only=True))
            if code:
                how = signal.Signals(-code).name if code < 0 else f"exit {code}"
                raise RankLost(f"rank {rank} of {size} ended with {how}")
    finally:
        for pid in ranks:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(size)]


def result(
    work: Callable[..., Any],
    size: int,
    args: tuple[Any, ...],
    *,
    axes: OverBackend,
    task: Task,
    folder: Path | None = None,
) -> list[Any] | Result:
    """`run` for a cell: what the ranks returned, or the row of a rank that failed or was lost."""
    try:
        found = run(
            work,
            size,
            args,
            folder=folder or Path(task.folder),
            backend=axes.backend_on(task.device),
            timeout_s=task.measure.timeout_s,
        )
    except RankLost as lost:
        return Result(status="crashed", reason=str(lost))
    if isinstance(found, Failure):
        return Result(status="oom" if found.out_of_memory else "error", reason=found.error)
    return found


def _fork(
    work: Callable[..., Any],
    rank: int,
    size: int,
    args: tuple[Any, ...],
    folder: Path,
    backend: str,
    timeout_s: float,
) -> int:
    pid = os.fork()
    if not pid:
        _be_rank(work, rank, size, args, folder, backend, timeout_s)
    return pid


def _be_rank(
    work: Callable[..., Any],
    rank: int,
    size: int,
    args: tuple[Any, ...],
    folder: Path,
    backend: str,
    timeout_s: float,
) -> NoReturn:
    code = 70
    try:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
        if torch.cuda.is_available():
            torch.cuda.set_device(rank % torch.cuda.device_count())
        dist.init_process_group(
            backend,
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
        )
        torch.save(work(rank, *args), folder / f"rank-{rank}.pt")
        dist.barrier()  # nobody leaves while another still talks to it
        code = 0
    except Exception as error:  # a rank's fault is the cell's reason
        traceback.print_exc()
        short = isinstance(error, MemoryError | torch.OutOfMemoryError)
        words = f"rank {rank}: {type(error).__name__}: {error}"[:2000]
        torch.save({"rank": rank, "error": words, "out_of_memory": short}, folder / f"failed-{rank}.pt")
        code = _FAILED
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
