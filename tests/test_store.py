"""Resume, locks, torn and foreign files, full disks: nothing lost, nothing twice, one clear message."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from harness import fingerprint, store
from harness.errors import HarnessError
from harness.store import Folder
from tests.conftest import Ran
from tests.sample import HEAD

THREE = HEAD + "[axes]\nn = [0, 1, 2]\n"


def inodes(ran: Ran) -> dict[str, int]:
    return {p.name: p.stat().st_ino for p in (ran.folder / "rows").iterdir()}


def test_a_finished_run_is_not_measured_again(run_suite: Callable[..., Ran]) -> None:
    first = inodes(run_suite(THREE))
    again = run_suite(THREE)
    assert inodes(again) == first
    assert "3 of 3 cells have their row already" in again.text


def test_a_torn_a_foreign_and_a_misnamed_file_are_set_aside_and_their_cells_run_again(
    run_suite: Callable[..., Ran],
) -> None:
    ran = run_suite(THREE)
    paths = sorted((ran.folder / "rows").iterdir())
    paths[0].write_bytes(paths[0].read_bytes()[:100])
    paths[1].rename(paths[1].with_name("0123456789abcdef.r0.json"))
    (ran.folder / "rows" / "notes.txt").write_text("mine")
    (ran.folder / "rows" / "x.part").write_text("half")
    kept = paths[2].stat().st_ino
    again = run_suite(THREE)
    assert sorted(r.axes["n"] for r in again.rows) == [0, 1, 2]
    assert paths[2].stat().st_ino == kept
    aside = {p.name for p in (ran.folder / "set-aside").iterdir()}
    assert aside == {paths[0].name, "0123456789abcdef.r0.json", "notes.txt"}
    for name in aside:
        assert name in again.text


def test_crashed_rows_stay_until_retry(run_suite: Callable[..., Ran]) -> None:
    toml = HEAD + '[axes]\ndo = ["sleep", "nothing"]\ns = [9.0]\n[measure]\ntimeout_s = 0.3\ngrace_s = 0.2\n'
    first = run_suite(toml)
    assert first.row(do="sleep").status == "timeout"
    assert first.outcome.exit_code == 1
    before = inodes(first)
    assert inodes(run_suite(toml)) == before
    started = {r.cell: r.started_at for r in first.rows}
    again = run_suite(toml, retry=True).rows
    assert {r.axes["do"] for r in again if r.started_at != started[r.cell]} == {"sleep"}


@pytest.mark.parametrize("part", ["stack", "device", "code"])
def test_another_stack_device_or_code_runs_cells_again(
    run_suite: Callable[..., Ran], part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_suite(THREE)
    digests = fingerprint.digests
    monkeypatch.setattr(fingerprint, "digests", lambda parts: {**digests(parts), part: "0" * 12})
    again = run_suite(THREE)
    assert all(r.fingerprint[part] == "0" * 12 for r in again.rows)
    assert len(again.rows) == 3


def test_another_host_with_the_same_device_stands(
    run_suite: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_suite(THREE)
    digests = fingerprint.digests
    monkeypatch.setattr(fingerprint, "digests", lambda parts: {**digests(parts), "host": "0" * 12})
    assert "3 of 3 cells have their row already" in run_suite(THREE).text


def test_fresh_keeps_the_earlier_run_aside(run_suite: Callable[..., Ran]) -> None:
    first = run_suite(THREE)
    again = run_suite(THREE, fresh=True)
    kept = [p for p in first.folder.parent.iterdir() if p.name.startswith("run.")]
    assert len(kept) == 1
    assert len(list((kept[0] / "rows").iterdir())) == len(again.rows) == 3


def test_rows_of_cells_that_left_the_suite_are_set_aside(run_suite: Callable[..., Ran]) -> None:
    run_suite(THREE)
    again = run_suite(HEAD + "[axes]\nn = [0, 1]\n")
    assert sorted(r.axes["n"] for r in again.rows) == [0, 1]
    assert "the suite no longer has" in again.text


def test_a_run_in_use_says_by_whom(run_suite: Callable[..., Ran], tmp_path: Path) -> None:
    with Folder(tmp_path / "run"), pytest.raises(HarnessError, match=f"in use by process {os.getpid()}"):
        run_suite(THREE)


def test_a_folder_of_another_schema_or_kind_is_refused(run_suite: Callable[..., Ran], tmp_path: Path) -> None:
    run_suite(THREE)
    path = tmp_path / "run" / "run.json"
    run = msgspec.json.decode(path.read_bytes())
    for change, message in (
        ({"schema": 99}, "schema is 99; this program reads schema 1"),
        ({"probe": "other"}, "holds a run of probe 'other'"),
        ({"cells": "many"}, "is no run of this program"),
    ):
        path.write_bytes(msgspec.json.encode({**run, **change}))
        with pytest.raises(HarnessError, match=message):
            run_suite(THREE)
    path.write_text("{")
    with pytest.raises(HarnessError, match="is no run of this program"):
        run_suite(THREE)


def test_an_output_folder_that_cannot_be_made_is_one_message(
    run_suite: Callable[..., Ran], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HarnessError, match="cannot be written: Not a directory"):
        run_suite(THREE, out=tmp_path / "file" / "run")


def test_a_full_disk_keeps_finished_rows_and_leaves_no_half_row(
    run_suite: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync
    calls = iter(range(100))

    def full(fd: int) -> None:
        if next(calls) >= 2:  # run.json and one row fit
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd)

    monkeypatch.setattr(store.os, "fsync", full)
    with pytest.raises(HarnessError, match="the disk is full. Finished rows are kept"):
        run_suite(THREE)
    assert [p.suffix for p in (tmp_path / "run" / "rows").iterdir()] == [".json"]
    assert not (tmp_path / "run" / "scratch").exists()
    monkeypatch.setattr(store.os, "fsync", real)
    assert len(run_suite(THREE).rows) == 3


def test_a_skip_that_comes_later_takes_no_measured_row(run_suite: Callable[..., Ran]) -> None:
    first = inodes(run_suite(THREE))
    skip = '[[skip]]\nwhen = { n = 1 }\nreason = "not today"\n'
    again = run_suite(THREE + skip)
    assert inodes(again) == first
    assert again.row(n=1).status == "ok"


def test_expectations_that_changed_are_applied_to_rows_that_stand(run_suite: Callable[..., Ran]) -> None:
    toml = HEAD + '[axes]\ndo = ["sleep", "nothing"]\ns = [9.0]\n[measure]\ntimeout_s = 0.3\ngrace_s = 0.2\n'
    first = run_suite(toml)
    assert (first.row(do="sleep").expected, first.outcome.exit_code) == (False, 1)
    known = '[[expect]]\nwhen = { do = "sleep" }\nstatus = ["timeout"]\n'
    again = run_suite(toml + known)
    assert (again.row(do="sleep").expected, again.outcome.exit_code) == (True, 0)
    assert again.row(do="sleep").started_at == first.row(do="sleep").started_at


@pytest.mark.parametrize("fresh", [False, True])
def test_a_folder_of_something_else_is_neither_written_into_nor_renamed(
    run_suite: Callable[..., Ran], tmp_path: Path, fresh: bool
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(HarnessError, match=r"holds 'thesis.tex' and no run"):
        run_suite(THREE, out=tmp_path / "mine", fresh=fresh)
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["thesis.tex"]


def test_folders_where_files_should_be_are_one_message_or_set_aside(
    run_suite: Callable[..., Ran], tmp_path: Path
) -> None:
    ran = run_suite(THREE)
    (ran.folder / "rows" / "x.part").mkdir()
    again = run_suite(THREE)
    assert "x.part" in again.text
    assert (ran.folder / "set-aside" / "x.part").is_dir()
    (ran.folder / "run.json").unlink()
    (ran.folder / "run.json").mkdir()
    with pytest.raises(HarnessError, match=r"run.json: cannot be read: Is a directory"):
        run_suite(THREE)


def test_cells_are_counted_over_all_calls_of_a_folder(run_suite: Callable[..., Ran]) -> None:
    def counted() -> object:
        return msgspec.json.decode((ran.folder / "run.json").read_bytes())["cells"]

    ran = run_suite(THREE, only=["n=0"])
    assert counted() == 1
    run_suite(THREE, only=["n=1"])
    assert counted() == 2
    run_suite(THREE)
    assert counted() == 3


def test_which_of_equal_gpus_and_how_many_is_no_other_device() -> None:
    def parts(gpus: int, visible: str, power: float = 700.0) -> dict[str, dict[str, object]]:
        return {
            "stack": {"torch": "2", "env": {"CUDA_VISIBLE_DEVICES": visible, "OMP_NUM_THREADS": "1"}},
            "device": {"driver": "1", "names": ["H200"] * gpus, "power_limit_w": [power] * gpus},
            "code": {"hash": "c"},
        }

    base = fingerprint.digests(parts(1, "0"))
    assert fingerprint.digests(parts(8, "3")) == base
    assert fingerprint.digests(parts(1, "0", power=400.0)) != base
