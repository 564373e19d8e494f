"""N ranks as one cell: forks of the cell's own process, in its group, under its deadline; or torchrun's processes.

The forks meet at a file in the cell's folder, so no port is taken and none has to be freed. A rank that is lost ends
the cell at once and by name, instead of leaving the others to wait for it.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, Protocol, cast

import msgspec
import torch
import torch.distributed as dist

from harness.cells import Task
from harness.rows import Result
from harness.torchrun import nodes, options
from probes.launched import Order, write_failure

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


@dataclass(frozen=True, kw_only=True)
class Crew:
    """work(rank, *args) on `size` ranks of one process group; what each returns is anything that torch.save takes."""

    work: Callable[..., Any]
    size: int
    args: tuple[Any, ...]
    folder: Path
    backend: str
    timeout_s: float  # of a collective


def run(crew: Crew) -> list[Any] | Failure:
    """What each rank returned; the first whose work raises is the Failure, and the others are ended.

    The caller has used no device, and no tensor operation that keeps threads: its forks would inherit them.
    Raises RankLost for a rank that was killed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    ranks = {_fork(crew, rank): rank for rank in range(crew.size)}
    try:
        while ranks:
            pid, status = os.wait()
            if pid not in ranks:
                continue
            rank, code = ranks.pop(pid), os.waitstatus_to_exitcode(status)
            if code == _FAILED:
                return Failure(**torch.load(crew.folder / f"failed-{rank}.pt", weights_only=True))
            if code:
                raise RankLost(f"rank {rank} of {crew.size} ended with {_how(code)}")
    finally:
        for pid in ranks:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return [torch.load(crew.folder / f"rank-{rank}.pt", weights_only=False) for rank in range(crew.size)]


def launch(crew: Crew, launcher: str) -> list[Any] | Failure:
    """`run`, the ranks started by torchrun with the user's options: on `nodes(launcher)` hosts, cold processes all.

    Raises RankLost for a rank that was killed, or where the hosts do not meet.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import get_args_parser
    from torch.distributed.run import run as torchrun

    hosts, folder = nodes(launcher), crew.folder
    order = Order(f"{crew.work.__module__}:{crew.work.__qualname__}", crew.backend, crew.timeout_s)
    (folder / "order.json").write_bytes(msgspec.json.encode(order))
    (folder / "args.pkl").write_bytes(pickle.dumps(crew.args))
    given = [*options(launcher), f"--nproc-per-node={crew.size // hosts}"]
    meeting = [] if hosts > 1 else ["--standalone"]
    parsed = get_args_parser().parse_args([*meeting, *given, "-m", "probes.launched", str(folder)])
    try:
        torchrun(parsed)
    except ChildFailedError as failed:
        return _first_of(failed, crew)
    except (ValueError, RuntimeError) as error:  # its options are wrong, or the hosts did not meet
        raise RankLost(f"torchrun: {type(error).__name__}: {error}") from error
    return cast("list[Any]", torch.load(folder / "ranks.pt", weights_only=False))


def _first_of(failed: Any, crew: Crew) -> Failure:
    """What ended the ranks, of torchrun's ChildFailedError. Raises RankLost where that was no exception of a rank.

    The agent ends the others by SIGTERM; and a rank whose neighbour was killed says "connection reset".
    """
    ended = {rank: failure.exitcode for rank, failure in failed.failures.items()}
    killed = [rank for rank, code in ended.items() if code < 0 and code != -signal.SIGTERM]
    told = sorted(crew.folder.glob("failed-*.pt"), key=lambda path: path.stat().st_mtime_ns)
    if told and not killed:
        return Failure(**torch.load(told[0], weights_only=True))
    rank = min(killed or ended)
    raise RankLost(f"rank {rank} of {crew.size} ended with {_how(ended[rank])}") from failed


def _how(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit {code}"


def result(
    work: Callable[..., Any],
    size: int,
    args: tuple[Any, ...],
    *,
    axes: OverBackend,
    task: Task,
    folder: Path | None = None,
) -> list[Any] | Result:
    """What the ranks of a cell returned, or the row of one that failed or was lost.

    A launcher starts them where the task names one; a single rank needs none.
    """
    crew = Crew(
        work=work,
        size=size,
        args=args,
        folder=folder or Path(task.folder),
        backend=axes.backend_on(task.device),
        timeout_s=task.measure.timeout_s,
    )
    launched = task.launcher and size > 1
    if launched and size % nodes(task.launcher):
        return Result(
            status="unsupported", reason=f"{size} ranks do not divide over {nodes(task.launcher)} nodes"
        )
    try:
        found = launch(crew, task.launcher) if launched else run(crew)
    except RankLost as lost:
        return Result(status="crashed", reason=str(lost))
    if isinstance(found, Failure):
        return Result(status="oom" if found.out_of_memory else "error", reason=found.error)
    return found


def _fork(crew: Crew, rank: int) -> int:
    pid = os.fork()
    if not pid:
        _be_rank(crew, rank)
    return pid


def _be_rank(crew: Crew, rank: int) -> NoReturn:
    code = 70
    try:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // crew.size))
        if torch.cuda.is_available():
            torch.cuda.set_device(rank % torch.cuda.device_count())
        dist.init_process_group(
            crew.backend,
            init_method=f"file://{crew.folder}/rendezvous",
            rank=rank,
            world_size=crew.size,
            timeout=timedelta(seconds=crew.timeout_s),
        )
        torch.save(crew.work(rank, *crew.args), crew.folder / f"rank-{rank}.pt")
        dist.barrier()  # nobody leaves while another still talks to it
        code = 0
    except Exception as error:  # a rank's fault is the cell's reason
        traceback.print_exc()
        write_failure(crew.folder, rank, error)
        code = _FAILED
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
