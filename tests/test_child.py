"""A probe that breaks its contract gives a row that names the probe."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from harness.cells import Axes, Measure, Task
from harness.child import execute
from harness.outcome import judge
from harness.rows import Result


def nothing(axes: Axes, task: Task) -> Result:
    return None  # type: ignore[return-value]


def no_json(axes: Axes, task: Task) -> Result:
    return Result(facts={"what": object()})  # type: ignore[dict-item]


def leaves(axes: Axes, task: Task) -> Result:
    sys.exit(3)


def _task(name: str, folder: Path) -> Task:
    return Task(
        id="t",
        work=f"tests.test_child:{name}",
        axes={},
        device="cpu",
        measure=Measure(),
        seed=0,
        folder=str(folder),
        result_path=str(folder / "result.json"),
        log_path="",
    )


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nothing", "tests.test_child:nothing returned a NoneType, not a Result"),
        ("no_json", "object"),
        ("leaves", "tests.test_child:leaves called sys.exit(3)"),
    ],
)
def test_a_broken_contract_is_an_error_with_its_reason(name: str, says: str, tmp_path: Path) -> None:
    found = execute(_task(name, tmp_path))
    assert found.status == "error"
    assert says in found.reason


@pytest.mark.parametrize("content", [None, "[" * 200_000])
def test_a_result_file_that_cannot_be_read_is_a_row(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.mkdir() if content is None else path.write_text(content)
    found = judge(_task("nothing", tmp_path), "exit 0", timed_out=False, oom_kills=0)
    assert found.status == "error"
    assert "the result is not readable" in found.reason
