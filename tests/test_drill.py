"""The fault drill: every fault one row with the right status, nothing left, the next cell unharmed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.suite import SUITES
from probes import fault_drill
from tests.conftest import Ran

WANTED = {
    "raise": ("error", "RuntimeError: the drill raised this"),
    "raise-multiline": ("error", "first line | with a pipe\nsecond line"),
    "exit-3": ("crashed", "exit 3 before a result"),
    "exit-0": ("crashed", "exit 0 without a result"),
    "segv-before": ("crashed", "SIGSEGV before a result"),
    "segv-after": ("crashed", "SIGSEGV after its result was written"),
    "sigkill": ("crashed", "SIGKILL before a result; not sent by the harness"),
    "oom-host": ("oom", "MemoryError"),
    "sleep": ("timeout", "deadline of 2 s; ended by SIGTERM"),
    "print": ("timeout", "deadline of 2 s; ended by SIGTERM"),
    "ignore-term": ("timeout", "deadline of 2 s; ended by SIGKILL"),
    "nan": ("ok", ""),
    "huge-result": ("error", "the largest kept is 16 MiB"),
    "garbage-result": ("error", "the result is not readable: not JSON"),
    "fork": ("ok", ""),
    "daemon": ("ok", ""),
    "shared-memory": ("crashed", "SIGKILL before a result"),
    "none": ("ok", ""),
}


@pytest.fixture
def drill(run_suite: Callable[..., Ran]) -> Ran:
    return run_suite((SUITES / "drill.toml").read_text(), fault_drill.PROBE)


@pytest.mark.usefixtures("no_leftovers")
def test_every_fault_is_one_row_with_the_right_status_and_nothing_is_left(drill: Ran) -> None:
    assert len(drill.rows) == len(WANTED)
    for fault, (status, reason) in WANTED.items():
        row = drill.row(fault=fault)
        assert (row.status, reason in row.reason) == (status, True), row
    assert drill.outcome.unexpected == 0
    assert drill.outcome.exit_code == 0
    _check_strict_json(drill.folder)
    assert {p.name for p in drill.folder.iterdir()} == {"run.json", "rows", "logs"}
    assert not list(drill.folder.rglob("*.part"))
    assert max(p.stat().st_size for p in (drill.folder / "logs").iterdir()) <= 1 << 20
    assert drill.row(fault="daemon").isolation.killed_strays == 1
    assert drill.row(fault="segv-before").log_tail[-1] == "about to read address 0"
    assert drill.row(fault="nan").nulls == {
        "loss[1]": "NaN",
        "loss[2]": "infinity",
        "facts.worst": "-infinity",
    }
    assert drill.row(fault="sleep").wall_s == pytest.approx(2, abs=0.5)
    assert drill.row(fault="print").wall_s == pytest.approx(2, abs=0.5)


def _check_strict_json(folder: Path) -> None:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    for path in (folder / "rows").iterdir():
        json.loads(path.read_text(), parse_constant=refuse)
