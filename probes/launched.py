"""A rank that torchrun started: `python -m probes.launched FOLDER`. Its work lies there, and what it found comes there.

Several hosts share no folder, so every rank's result goes to all of them.
"""

from __future__ import annotations

import importlib
import os
import pickle
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist


class Order(msgspec.Struct, frozen=True):
    """What every rank has to do."""

    work: str  # "module:function"
    backend: str
    timeout_s: float


def main(folder: Path) -> int:
    """Do the work; 1 where it raised, its words in the folder."""
    order = msgspec.json.decode((folder / "order.json").read_bytes(), type=Order)
    args = pickle.loads((folder / "args.pkl").read_bytes())
    rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    try:
        if torch.cuda.is_available():
            torch.cuda.set_device(local % torch.cuda.device_count())
        dist.init_process_group(order.backend, timeout=timedelta(seconds=order.timeout_s))
        module, _, name = order.work.partition(":")
        mine = getattr(importlib.import_module(module), name)(rank, *args)
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, mine)
        if local == 0:
            torch.save(found, folder / "ranks.pt")
        dist.barrier()
    except Exception as error:  # a rank's fault is the cell's reason
        traceback.print_exc()
        write_failure(folder, rank, error)
        return 1
    dist.destroy_process_group()
    return 0


def write_failure(folder: Path, rank: int, error: Exception) -> None:
    """What a rank's exception said, for the process that waits for the ranks."""
    short = isinstance(error, MemoryError | torch.OutOfMemoryError)
    words = f"rank {rank}: {type(error).__name__}: {error}"[:2000]
    torch.save({"rank": rank, "error": words, "out_of_memory": short}, folder / f"failed-{rank}.pt")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
