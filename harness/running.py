"""A cell on its way: what the runner remembers of it between its start and its row."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import msgspec

from harness import outcome
from harness.cells import Cell, Task
from harness.isolate import Launched
from harness.rows import Isolation
from harness.wire import Ended


class Running(msgspec.Struct, kw_only=True):
    """One started cell."""

    cell: Cell
    task: Task
    devices: tuple[str, ...]
    cache: str
    neighbours: set[str]
    asked_at: float
    started_at: str
    oom_kills: int
    launched: Launched | None = None
    deadline: float = float("inf")
    signals: int = 0  # 0 running, 1 TERM sent, 2 KILL sent, 3 server abandoned

    @property
    def log(self) -> Path:
        """The cell's output."""
        return Path(self.task.log_path)

    def isolation(self, ended: Ended | None, env: dict[str, str]) -> Isolation:
        """How the cell was kept apart; `ended` is None where its server died."""
        launched = self.launched
        return Isolation(
            method=launched.method if launched else "none",
            reason=launched.reason if launched else "",
            cache=self.cache,
            pid=launched.pid if launched else None,
            exit=ended.exit if ended else "",
            cpu_s=ended.cpu_s if ended else None,
            killed_strays=ended.killed_strays if ended else 0,
            neighbours=tuple(sorted(self.neighbours)),
            devices=self.devices,
            env=env,
        )

    def discard(self) -> None:
        """Remove the scratch folder, and the log if nothing was printed."""
        shutil.rmtree(self.task.folder, ignore_errors=True)
        outcome.cap_log(self.log, outcome.KEPT_LOG_BYTES)
        with contextlib.suppress(OSError):
            if self.log.stat().st_size == 0:
                self.log.unlink()
