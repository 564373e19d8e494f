"""What does isolation cost? The same small CPU training cell in-process, forked, and in a cold Python.

    .venv/bin/python -m pytest benchmarks --benchmark-columns=median,iqr,rounds

Run by hand; figures go to LOG.md with their date. Nothing here asserts on time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from harness import child
from harness.cells import Measure, Task
from harness.isolate import Kind, Launcher
from harness.outcome import judge
from harness.rows import Result
from harness.wire import Ended
from probes import train_step

WORKS = {"bare training": "benchmarks.bare_cell:run", "train-step": train_step.PROBE.work}
AXES = {"model": "tiny-qwen2-4h", "attention": "sdpa", "dtype": "fp32", "seq": 128}
_ids = itertools.count()


class Cells:
    """Runs the cell through one launcher, as a suite would."""

    def __init__(self, folder: Path, isolation: str, work: str) -> None:
        self.launcher = Launcher(folder, isolation)
        self.kind = Kind(preload=(*train_step.PROBE.preload, work.split(":")[0]))
        self.folder = folder
        self.work = work

    def run(self) -> Result:
        made = task(self.launcher.cell_folder(), self.folder, self.work)
        self.launcher.start(made, self.kind)
        while True:
            for event in self.launcher.wait(1.0):
                if isinstance(event, Ended):
                    return judge(made, event.exit, timed_out=False, oom_kills=0)


def task(folder: Path, logs: Path, work: str) -> Task:
    axes = msgspec.structs.asdict(msgspec.convert(AXES, train_step.PROBE.axes))
    name = f"bench{next(_ids)}"
    return Task(
        id=name,
        work=work,
        axes=axes,
        device="cpu",
        measure=Measure(warmup_steps=1, steps=3),
        seed=0,
        folder=str(folder),
        result_path=str(folder / "result.json"),
        log_path=str(logs / f"{name}.log"),
        env={"TMPDIR": str(folder / "t"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")},
    )


@pytest.fixture(params=WORKS)
def work(request: pytest.FixtureRequest) -> str:
    return WORKS[request.param]


@pytest.fixture(params=["forkserver", "spawn"])
def cells(request: pytest.FixtureRequest, tmp_path: Path, work: str) -> Iterator[Cells]:
    made = Cells(tmp_path, request.param, work)
    yield made
    made.launcher.close()


def test_isolated(cells: Cells, benchmark: object) -> None:
    rounds = 30 if cells.launcher.isolation == "forkserver" else 5
    result = benchmark.pedantic(cells.run, rounds=rounds, warmup_rounds=1)  # type: ignore[attr-defined]
    _check(result)


def test_in_process(tmp_path: Path, work: str, benchmark: object) -> None:
    def run() -> Result:
        return child.execute(task(tmp_path, tmp_path, work))

    result = benchmark.pedantic(run, rounds=30, warmup_rounds=2)  # type: ignore[attr-defined]
    _check(result)


def _check(result: Result) -> None:
    """Each timing stands beside a numerical check: the same seed, so the same loss everywhere."""
    assert result.status == "ok", result.reason
    assert result.loss[0] == pytest.approx(6.1237278, abs=1e-6)
    assert result.verdict in (None, "ok"), result.verdict_reason
