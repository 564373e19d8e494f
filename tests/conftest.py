"""Helpers that several test files share."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

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

    def run(toml: str, probe: Probe = sample.PROBE, name: str = "t", **options: object) -> Ran:
        parsed = suite.parse(toml, f"{name}.toml", {probe.name: probe})
        console = Console(file=io.StringIO(), width=200)
        chosen = session.Options(**{"out": tmp_path / "run", **options})  # type: ignore[arg-type]
        outcome = session.execute(parsed, chosen, console)
        return Ran(outcome, console.file.getvalue())  # type: ignore[attr-defined]

    return run


@pytest.fixture
def no_leftovers() -> object:
    """No process of ours, and no shared-memory segment, outlives the test."""
    before = {p.pid for p in psutil.process_iter()}
    shm = set(os.listdir("/dev/shm"))
    yield
    left = [p for p in psutil.process_iter(["cmdline"]) if p.pid not in before and _is_ours(p)]
    assert not left, left
    assert not [
        name for name in set(os.listdir("/dev/shm")) - shm if name.startswith(("psm_", "torch_", "sem."))
    ]


def _is_ours(process: psutil.Process) -> bool:
    try:
        return any("harness." in word for word in process.cmdline())
    except psutil.Error:
        return False
