"""The commands as a person types them: messages, exit codes, nothing half written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, rows_of


def harness(*arguments: str, module: str = "harness", **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **env},
        timeout=120,
    )


WRONG = {
    "unknown suite": (("run", "singel"), "unknown suite 'singel'. Did you mean 'single'?"),
    "missing file": (("run", "no/such.toml"), "no/such.toml: no such file"),
    "unknown device": (
        ("plan", "single", "--device", "gpu"),
        "--device: unknown device 'gpu'. Did you mean 'cpu'?",
    ),
    "unknown axis": (
        ("plan", "drill", "--only", "falt=none"),
        "--only falt=none: unknown axis 'falt'. Did you mean 'fault'?",
    ),
    "unknown value": (
        ("plan", "drill", "--only", "fault=rais"),
        "unknown value 'rais'. Did you mean 'raise'?",
    ),
    "bad shard": (("run", "drill", "--shard", "3/2"), "--shard 3/2: write it as i/n"),
    "bad isolation": (("run", "drill", "--isolation", "fork"), "--isolation: unknown isolation 'fork'"),
    "bad format": (("report", "results", "--format", "pdf"), "--format: unknown format 'pdf'"),
    "GPUs for a CPU suite": (
        ("run", "drill", "--devices", "3", "--device", "cpu"),
        "--devices 3: names GPUs",
    ),
    "a name that is no text": (("run", "drill", "--out", os.fsdecode(b"caf\xe9")), "is not UTF-8"),
    "no folder named": (("run", "drill", "--out", ""), "and no run; give --out a new or empty folder"),
    "no run there": (("report", "no/such/run"), "no/such/run"),
}


@pytest.mark.parametrize(("arguments", "message"), WRONG.values(), ids=WRONG)
def test_wrong_input_is_one_message_and_exit_2(arguments: tuple[str, ...], message: str) -> None:
    done = harness(*arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_sweep_outlives_the_reader_of_its_progress(tmp_path: Path) -> None:
    arguments = f"-m harness run drill --only fault=none,raise --no-report --out {tmp_path / 'run'}"
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} {arguments} > /dev/full"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "run" / "rows").iterdir())) == 2


def test_a_bad_suite_leaves_no_folder(tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(
        'schema = 1\ntitle = "t"\nprobe = "train-step"\ndevice = "cpu"\n[axes]\nmodell = ["tiny-qwen2"]\n'
    )
    done = harness("run", str(file), "--out", str(tmp_path / "run"))
    assert done.returncode == 2
    assert "axes.modell[0]: unknown axis of probe 'train-step' 'modell'. Did you mean 'model'?" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_probe_that_does_not_exist_is_named_with_the_nearest() -> None:
    done = harness("fault-dril", module="harness.probe")
    assert done.returncode == 2
    assert "unknown probe 'fault-dril'. Did you mean 'fault-drill'?" in done.stderr


def test_a_probe_without_axes_names_its_axes_and_its_suites() -> None:
    done = harness("fault-drill", module="harness.probe")
    assert done.returncode == 2
    assert "axis=value (fault, n), or run a suite of it: python -m harness run drill" in done.stderr


def test_probe_list_shows_questions_and_axes() -> None:
    done = harness("--list", module="harness.probe")
    assert done.returncode == 0
    assert "train-step: " in done.stdout
    assert "fault: none, raise" in done.stdout


def test_a_probe_runs_with_axes_from_the_command_line(tmp_path: Path) -> None:
    done = harness("fault-drill", "fault=none,raise", "--out", str(tmp_path / "run"), module="harness.probe")
    assert done.returncode == 1, done.stderr
    assert "the drill raised this" in done.stdout
    assert {r.axes["fault"] for r in rows_of(tmp_path / "run")} == {"none", "raise"}


def test_a_cuda_suite_elsewhere_is_skipped_cell_by_cell_with_the_reason(tmp_path: Path) -> None:
    done = harness(
        "run",
        "single",
        "--device",
        "cuda",
        "--only",
        "seq=1024",
        "--out",
        str(tmp_path / "run"),
        CUDA_VISIBLE_DEVICES="",
    )
    assert done.returncode == 0, done.stderr
    rows = rows_of(tmp_path / "run")
    assert rows
    assert {r.status for r in rows} == {"skipped"}
    assert any("CUDA" in r.reason for r in rows)


def test_shards_together_are_the_suite(tmp_path: Path) -> None:
    for i in (1, 2):
        part = ("--only", "fault=none,raise,exit-0", "--shard", f"{i}/2", "--no-report")
        harness("run", "drill", *part, "--out", str(tmp_path / str(i)))
    faults = [r.axes["fault"] for i in (1, 2) for r in rows_of(tmp_path / str(i))]
    assert sorted(faults) == ["exit-0", "none", "raise"]
