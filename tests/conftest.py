"""Helpers that several test files share."""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # spinning threads on busy cores made small models four times slower

from harness import session, suite  # noqa: E402
from harness.cells import Probe  # noqa: E402
from harness.rows import Row, decode  # noqa: E402
from tests import sample  # noqa: E402


class Ran:
    """One run through the harness: its outcome, rows and what it printed."""

    def __init__(self, outcome: session.Outcome, text: str) -> None:
        self.outcome = outcome
        self.text = text
        self.folder = outcome.folder
        self.rows = rows_of(outcome.folder)

    def row(self, **axes: object) -> Row:
        """The one row with these axes."""
        found = [r for r in self.rows if all(r.axes[k] == v for k, v in axes.items())]
        assert len(found) == 1, found
        return found[0]


def rows_of(folder: Path) -> list[Row]:
    return [decode(path.read_bytes()) for path in sorted((folder / "rows").glob("*.json"))]


@pytest.fixture
def run_suite(tmp_path: Path) -> Callable[..., Ran]:
    """run_suite(toml, probe=…, **options): run a suite given as text, in this process."""

    def run(
        toml: str,
        probe: Probe = sample.PROBE,
        name: str = "t",
        only: Sequence[str] = (),
        **options: object,
    ) -> Ran:
        parsed = suite.parse(toml, f"{name}.toml", {probe.name: probe})
        parsed = suite.only(parsed, list(only)) if only else parsed
        console = Console(file=io.StringIO(), width=200)
        chosen = session.Options(**{"out": tmp_path / "run", **options})  # type: ignore[arg-type]
        outcome = session.execute(parsed, chosen, console)
        return Ran(outcome, console.file.getvalue())  # type: ignore[attr-defined]

    return run


@pytest.fixture
def no_leftovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No process of this test's run, and no shared-memory segment, outlives the test."""
    shm = set(os.listdir("/dev/shm"))
    monkeypatch.setenv("HARNESS_TEST", str(tmp_path))  # every process of the run inherits it
    yield
    left = processes_of(tmp_path)
    assert not left, left
    new = [name for name in set(os.listdir("/dev/shm")) - shm if name.startswith(("psm_", "torch_", "sem."))]
    assert not new or not _still_there(new), new


@pytest.fixture
def one_rank() -> Iterator[None]:
    """torch.distributed with this process alone in it."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def processes_of(test: Path) -> list[psutil.Process]:
    """The living processes that inherited HARNESS_TEST = this test's folder, forks of a server included."""
    return [process for process in psutil.process_iter() if _marked(process, str(test))]


def _marked(process: psutil.Process, value: str) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.environ().get("HARNESS_TEST") == value
    except psutil.Error:
        return False


def _still_there(names: list[str], for_s: float = 3.0) -> bool:
    """Whether segments stay: those of another program's run on this machine come and go."""
    limit = time.monotonic() + for_s
    while any(os.path.exists(f"/dev/shm/{name}") for name in names):
        if time.monotonic() > limit:
            return True
        time.sleep(0.1)
    return False
