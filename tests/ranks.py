"""Real processes over gloo, one per rank, for the tests of context parallelism."""

from __future__ import annotations

import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_ranks(function: Callable[..., Any], size: int, *args: Any, deadline_s: float = 120.0) -> list[Any]:
    """function(rank, *args) on `size` ranks of a gloo group; what each returned. Needs no port.

    The first failure ends all, and is raised with its rank and traceback; a hang ends at the deadline.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("fork")
        ranks = [
            context.Process(target=_rank, args=(function, rank, size, Path(folder), args), daemon=True)
            for rank in range(size)
        ]
        for process in ranks:
            process.start()
        try:
            _wait(ranks, Path(folder), time.monotonic() + deadline_s)
        finally:
            for process in ranks:
                process.kill()
                process.join()
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(size)]


def _wait(ranks: list[Any], folder: Path, until: float) -> None:
    while any(process.is_alive() for process in ranks):
        for rank, process in enumerate(ranks):
            process.join(0.02)
            if process.exitcode not in (None, 0):
                said = folder / f"{rank}.txt"
                text = said.read_text() if said.exists() else ""
                raise AssertionError(f"rank {rank} ended with {process.exitcode}\n{text}")
        if time.monotonic() > until:
            raise AssertionError(f"ranks {[i for i, p in enumerate(ranks) if p.is_alive()]} hang")
    for rank, process in enumerate(ranks):
        if process.exitcode:
            raise AssertionError(
                f"rank {rank} ended with {process.exitcode}\n{(folder / f'{rank}.txt').read_text()}"
            )


def _rank(function: Callable[..., Any], rank: int, size: int, folder: Path, args: tuple[Any, ...]) -> None:
    code = 1
    try:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
        torch.save(function(rank, *args), folder / f"{rank}.pt")
        dist.barrier()
        dist.destroy_process_group()
        code = 0
    except BaseException:
        (folder / f"{rank}.txt").write_text(traceback.format_exc())
    finally:
        os._exit(code)


def dies(rank: int) -> int:
    """Rank 1 is killed."""
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank


def raises(rank: int) -> int:
    """As a device without memory does."""
    raise torch.OutOfMemoryError("no more")
