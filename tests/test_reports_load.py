"""A run's folder is read as it is: damaged files are named, another schema is refused, nothing is written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.errors import HarnessError
from reports.load import load_run
from tests.conftest import ROOT
from tests.test_reports_sample import row, run, story, write


def test_a_run_comes_back_from_its_folder(tmp_path: Path) -> None:
    written = run(*story())
    found = load_run(write(tmp_path / "r", written))
    assert (found.name, found.title, found.damaged) == ("single.cuda", written.title, ())
    assert sorted(found.rows, key=repr) == sorted(written.rows, key=repr)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"status": "ok", "loss": [1.0,', "not JSON"),
        ('{"schema": 9}', "schema 9"),
        ("[]", "schema None"),
        ('{"schema": 1, "surprise": 1}', "surprise"),
        ("", "not JSON"),
    ],
)
def test_a_torn_or_foreign_row_is_named_and_not_fatal(tmp_path: Path, text: str, says: str) -> None:
    folder = write(tmp_path / "r", run(row()))
    (folder / "rows" / "torn.json").write_text(text)
    found = load_run(folder)
    assert len(found.rows) == 1
    assert [name for name, _ in found.damaged] == ["torn.json"]
    assert says in found.damaged[0][1]


def test_a_row_under_another_cells_name_is_damaged(tmp_path: Path) -> None:
    folder = write(tmp_path / "r", run(row()))
    one = next((folder / "rows").iterdir())
    one.rename(one.with_name("feedfeedfeedfeed.r0.json"))
    assert "holds cell" in load_run(folder).damaged[0][1]


def test_reading_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    folder = write(tmp_path / "r", run(row()))
    (folder / "rows" / "torn.json").write_text("{")
    (folder / "rows" / "x.part").write_text("{")
    before = sorted(folder.rglob("*"))
    load_run(folder)
    assert sorted(folder.rglob("*")) == before


def test_keys_that_are_missing_from_run_json_do_no_harm(tmp_path: Path) -> None:
    folder = write(tmp_path / "r", run(row()))
    (folder / "run.json").write_text('{"schema": 1}')
    found = load_run(folder)
    assert (found.name, found.title, len(found.rows)) == ("r", "r", 1)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"schema": 2}', "newer version"),
        ("{}", "schema is None"),
        ("[1]", "schema is None"),
        ("{", "cannot be read"),
    ],
)
def test_another_schema_is_refused_with_both_numbers(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(HarnessError, match=says):
        load_run(tmp_path)


def test_a_folder_without_a_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match="run.json: is not there"):
        load_run(tmp_path / "nowhere")


def test_an_empty_run_folder_is_a_run_without_rows(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps(run().meta))
    assert load_run(tmp_path).rows == ()


def test_reading_starts_quickly_and_loads_no_plotting() -> None:
    code = "import sys, reports.load, reports.bench, reports.answers; print(*sys.modules)"
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert not {"matplotlib", "pandas", "torch", "numpy"} & set(done.stdout.split())
    assert time.monotonic() - began < 1.0 + os.getloadavg()[0]
