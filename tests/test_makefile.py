"""The Makefile lists itself, uses each requirements file, and leaves no half-made environment."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from harness.wheels import SETS
from tests.conftest import ROOT

MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = re.findall(r"^([a-z][a-z-]*):", MAKEFILE, re.M)
MAKE = shutil.which("make")

pytestmark = pytest.mark.skipif(MAKE is None, reason="make is not installed")


# An outer `make test VENV=…` hands its variables down; these tests start from none.
OUTER = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "PYTHON", "VENV", "CONSTRAINTS", "ARGS", "V")


def _make(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name not in OUTER}
    return subprocess.run(["make", *words], cwd=cwd, capture_output=True, text=True, env=env)


def test_make_alone_lists_every_target_with_one_line_each() -> None:
    listed = re.findall(r"^  make (\S+) +(\S.*)$", _make().stdout, re.M)
    assert [name for name, _ in listed] == TARGETS
    assert len(TARGETS) <= 12
    assert _make().stdout == _make("help").stdout


def test_every_target_is_phony() -> None:
    phony = re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.M)
    assert phony is not None
    assert set(TARGETS) <= set(phony[1].split())


def test_every_requirements_file_is_used() -> None:
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "requirements").iterdir()}
    assert files == {one.constraints_file for one in SETS}
    assert all(name in MAKEFILE for name in files)


def test_both_sets_pin_the_same_but_for_torch_and_triton() -> None:
    default, volta = (_pins(one.constraints_file) for one in SETS)
    assert {line.split("==")[0] for line in default ^ volta} == {"torch", "triton"}


def test_every_direct_dependency_is_pinned() -> None:
    lines = (ROOT / "pyproject.toml").read_text().split("[tool.", 1)[0]
    names = set(re.findall(r'^(?:  |xformers = \[)"([a-z0-9-]+)', lines, re.M))
    assert len(names) > 15
    for one in SETS:
        assert names <= {line.split("==")[0] for line in _pins(one.constraints_file)}


def _pins(name: str) -> set[str]:
    lines = (ROOT / name).read_text().splitlines()
    return {line for line in lines if line and not line.startswith("#")}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What set-up reads, and a `python` whose pip does what the file `pip` says."""
    for name in ("Makefile", "pyproject.toml", "requirements", "harness"):
        path = ROOT / name
        (shutil.copytree if path.is_dir() else shutil.copy)(path, tmp_path / name)
    fake = tmp_path / "python"
    fake.write_text("""#!/bin/sh
case "$*" in
  "-m venv"*) mkdir -p .venv/bin; cp "$0" .venv/bin/python; echo venv >> calls ;;
  "-m pip --version") [ -x .venv/bin/python ] ;;
  "-m pip install"*) echo "$*" >> calls; exit "$(cat pip)" ;;
  "-m harness.wheels") echo "requirements/default.txt: no NVIDIA card: CPU" >&2; echo requirements/default.txt ;;
  "-m harness."*) : ;;
  "-m harness "*) exit "$(cat harness_exit)" ;;
esac
""")
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "pip").write_text("0")
    return tmp_path


def _setup(checkout: Path, *words: str, target: str = "setup") -> subprocess.CompletedProcess[str]:
    return _make(target, f"PYTHON={checkout / 'python'}", *words, cwd=checkout)


def _calls(checkout: Path) -> list[str]:
    return (checkout / "calls").read_text().splitlines()


def test_setup_installs_the_chosen_set_once_and_says_why(checkout: Path) -> None:
    first, second = _setup(checkout), _setup(checkout)
    assert first.returncode == second.returncode == 0
    assert "no NVIDIA card: CPU" in first.stderr
    assert "no NVIDIA card: CPU" in second.stderr
    assert [call.split()[-4:] for call in _calls(checkout)[1:]] == [
        ["-c", "requirements/default.txt", "-e", ".[dev]"]
    ]


def test_a_failed_setup_leaves_no_stamp_and_runs_again(checkout: Path) -> None:
    (checkout / "pip").write_text("1")
    assert _setup(checkout).returncode != 0
    assert not (checkout / ".venv/.ready").exists()
    (checkout / "pip").write_text("0")
    assert _setup(checkout).returncode == 0
    assert (checkout / ".venv/.ready").read_text() == "requirements/default.txt\n"
    assert _calls(checkout).count("venv") == 1


def test_a_set_that_the_user_names_replaces_the_one_that_is_there(checkout: Path) -> None:
    _setup(checkout)
    named = "CONSTRAINTS=requirements/volta.txt"
    assert _setup(checkout, named).returncode == 0
    assert _setup(checkout, named).returncode == 0
    installs = [call.split()[-3:] for call in _calls(checkout) if "install" in call]
    assert installs == [
        ["requirements/default.txt", "-e", ".[dev]"],
        ["requirements/volta.txt", "-e", ".[dev,xformers]"],
    ]


def test_any_target_that_needs_the_environment_makes_it(checkout: Path) -> None:
    (checkout / "harness_exit").write_text("0")
    assert _setup(checkout, target="doctor").returncode == 0
    assert (checkout / ".venv/.ready").exists()


@pytest.mark.parametrize(("code", "seen"), [(0, 0), (1, 2), (2, 2)])
def test_the_exit_of_the_harness_comes_through(checkout: Path, code: int, seen: int) -> None:
    (checkout / "harness_exit").write_text(str(code))
    done = _setup(checkout, target="sweep-single")
    assert done.returncode == seen  # make turns every failure into 2 and names the code
    assert (f"Error {code}" in done.stderr) is bool(code)
