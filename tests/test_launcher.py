"""`--launcher torchrun`: what is refused, ranks on two nodes, a lost rank by name."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from harness import torchrun
from harness.cells import Measure
from harness.errors import HarnessError
from harness.rows import Result
from probes import ranks
from probes.cp_parity import CpParityAxes
from tests.conftest import ROOT, rows_of
from tests.ranks import dies, raises
from tests.tasks import task
from tests.test_cli import harness

SUITE = """
schema = 1
title = "two nodes"
probe = "cp-parity"
device = "cpu"
measure = { timeout_s = 90 }
[fixed]
mode = "ring"
cp_size = 2
seq = 64
"""


@pytest.mark.parametrize(
    ("launcher", "words"),
    [
        ("torchrn", "Did you mean 'torchrun'"),
        ("mpirun", "allowed: torchrun"),
        ("'torchrun", "quotation"),
        ("torchrun --nproc-per-node=4", "the ranks are the cell's"),
        ("torchrun train.py", "options of torchrun"),
        ("torchrun --nnodes=1:4", "an elastic range is none"),
        ("torchrun --nnodes=2", "several nodes meet somewhere"),
    ],
)
def test_what_is_no_launcher_is_refused(launcher: str, words: str) -> None:
    with pytest.raises(HarnessError, match=words):
        torchrun.options(launcher)


def test_a_probe_of_one_process_has_nothing_to_launch(tmp_path: Path) -> None:
    done = harness("run", "drill", "--launcher", "torchrun", "--out", str(tmp_path / "o"))
    assert done.returncode == 2
    assert "cells of fault-drill are one process each" in done.stderr
    assert not (tmp_path / "o").exists()


@pytest.mark.slow
def test_two_nodes_share_a_cell_and_each_writes_its_row(tmp_path: Path) -> None:
    """Both nodes are this machine."""
    file = tmp_path / "two.toml"
    file.write_text(SUITE)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    meet = f"--rdzv-backend=c10d --rdzv-endpoint=localhost:{port}"
    runs = []
    for node in ("0", "1"):
        where = [
            "--out",
            str(tmp_path / node),
            "--launcher",
            f"torchrun --nnodes=2 --node-rank={node} {meet}",
        ]
        command = [sys.executable, "-m", "harness", "run", str(file), *where]
        out = subprocess.PIPE
        runs.append(subprocess.Popen(command, cwd=ROOT, text=True, stdout=out, stderr=subprocess.STDOUT))
    for node, run in enumerate(runs):
        said, _ = run.communicate(timeout=120)
        assert run.returncode == 0, said
        (row,) = rows_of(tmp_path / str(node))
        assert (row.status, row.verdict) == ("ok", "ok")


@pytest.mark.parametrize(
    ("work", "status", "reason"),
    [
        (dies, "crashed", "rank 1 of 2 ended with SIGKILL"),
        (raises, "oom", "OutOfMemoryError: no more"),
    ],
)
def test_a_lost_rank_is_named_under_torchrun_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: Callable[[int], int], status: str, reason: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    order = msgspec.structs.replace(task(measure=Measure(timeout_s=60), folder=tmp_path), launcher="torchrun")
    found = ranks.result(work, 2, (), axes=CpParityAxes(), task=order)
    assert isinstance(found, Result)
    assert found.status == status
    assert reason in found.reason


def test_ranks_that_no_two_nodes_share_evenly_are_unsupported(tmp_path: Path) -> None:
    two = "torchrun --nnodes=2 --rdzv-endpoint=localhost:1"
    order = msgspec.structs.replace(task(folder=tmp_path), launcher=two)
    found = ranks.result(dies, 3, (), axes=CpParityAxes(cp_size=3), task=order)
    assert isinstance(found, Result)
    assert (found.status, found.reason) == ("unsupported", "3 ranks do not divide over 2 nodes")
