"""The task of a cell that runs in the test's own process: `run(axes, task())`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.cells import Measure, Task


def task(
    device: str = "cpu", *, measure: Measure | None = None, seed: int = 0, folder: Path | None = None
) -> Task:
    """What a probe's work is given. folder: the cell's own, where it writes."""
    made: dict[str, Any] = {
        "id": "t",
        "work": "",
        "axes": {},
        "device": device,
        "measure": measure or Measure(),
        "seed": seed,
        "folder": "" if folder is None else str(folder),
        "result_path": "",
        "log_path": "",
    }
    return Task(**made)
