"""The runner dies or is interrupted: nothing survives it, and a resumed run has each row once."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.conftest import ROOT, processes_of, rows_of
from tests.sample import HEAD

_RUN = """
import sys
from pathlib import Path
from rich.console import Console
from harness import session, suite
from tests.sample import TABLE
parsed = suite.load(Path(sys.argv[1]), TABLE)
outcome = session.execute(parsed, session.Options(out=Path(sys.argv[2])), Console())
sys.exit(outcome.exit_code)
"""


def _heed() -> None:
    """A job in the background ignores SIGINT, under nohup SIGHUP too, and its children with it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def _start(tmp_path: Path, toml: str) -> subprocess.Popen[str]:
    file = tmp_path / "kill.toml"
    file.write_text(HEAD + toml)
    return subprocess.Popen(
        [sys.executable, "-c", _RUN, str(file), str(tmp_path / "run")],
        cwd=ROOT,
        env={**os.environ, "HARNESS_TEST": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=_heed,
        start_new_session=True,
    )


def _wait_until_gone(tmp_path: Path, within_s: float = 5) -> None:
    limit = time.monotonic() + within_s
    while left := processes_of(tmp_path):
        assert time.monotonic() < limit, f"still there: {left}"
        time.sleep(0.02)


def test_a_runner_killed_at_50_random_moments_and_resumed_has_every_row_once(tmp_path: Path) -> None:
    cells = 1500
    toml = f"[axes]\nn = {list(range(cells))}\n"
    chance = random.Random(0)
    inodes: dict[str, int] = {}
    for _ in range(50):
        runner = _start(tmp_path, toml)
        time.sleep(chance.uniform(0.05, 1.0))
        runner.kill()
        runner.wait()
        _wait_until_gone(tmp_path)
        rows = tmp_path / "run" / "rows"
        now = {p.name: p.stat().st_ino for p in rows.glob("*.json")} if rows.exists() else {}
        assert all(now.get(name) == inode for name, inode in inodes.items()), (
            "a finished row was written again"
        )
        inodes = now
    assert len(inodes) > 0
    last = _start(tmp_path, toml)
    text, _ = last.communicate(timeout=120)
    assert last.returncode == 0, text
    measured = rows_of(tmp_path / "run")
    assert sorted(row.axes["n"] for row in measured) == list(range(cells))
    assert {row.status for row in measured} == {"ok"}
    left = {p.name for p in (tmp_path / "run").iterdir()}
    assert left == {"run.json", "rows", "logs"}, left


def test_a_running_cell_dies_with_its_runner(tmp_path: Path) -> None:
    runner = _start(tmp_path, '[axes]\ndo = ["sleep"]\ns = [60.0]\n')
    log = tmp_path / "run" / "logs"
    limit = time.monotonic() + 20
    while not any(log.glob("*.r0.log")):
        assert time.monotonic() < limit
        time.sleep(0.02)
    server = psutil.Process(runner.pid).children()[0]
    family = [server, *server.children(recursive=True)]
    assert len(family) == 2
    assert {p.pid for p in family} < {p.pid for p in processes_of(tmp_path)}, (
        "else the leak check sees nothing"
    )
    runner.kill()
    runner.wait()
    _, alive = psutil.wait_procs(family, timeout=5)
    assert not alive


def test_a_running_cell_dies_with_a_killed_server_and_becomes_a_crashed_row(tmp_path: Path) -> None:
    runner = _start(tmp_path, '[axes]\ndo = ["sleep", "nothing"]\ns = [60.0]\n')
    log = tmp_path / "run" / "logs"
    limit = time.monotonic() + 20
    while not any(log.glob("*.r0.log")):
        assert time.monotonic() < limit
        time.sleep(0.02)
    server = psutil.Process(runner.pid).children()[0]
    cell = server.children()[0]
    server.kill()
    text, _ = runner.communicate(timeout=30)
    assert runner.returncode == 1, text
    _, alive = psutil.wait_procs([cell], timeout=5)
    assert not alive
    assert {(r.axes["do"], r.status) for r in rows_of(tmp_path / "run")} == {
        ("sleep", "crashed"),
        ("nothing", "ok"),
    }


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_keeps_finished_rows_and_exits_with_130(
    tmp_path: Path, number: signal.Signals, times: int
) -> None:
    runner = _start(tmp_path, '[axes]\nn = [0, 1, 2]\n[[include]]\ndo = "sleep"\ns = 60.0\n')
    rows = tmp_path / "run" / "rows"
    limit = time.monotonic() + 20
    while len(list(rows.glob("*.json")) if rows.exists() else []) < 3:
        assert time.monotonic() < limit
        time.sleep(0.02)
    time.sleep(0.2)
    began = time.monotonic()
    for _ in range(times):  # an impatient user's second Ctrl-C loses nothing
        os.kill(runner.pid, number)
        time.sleep(0.05)
    text, _ = runner.communicate(timeout=30)
    assert runner.returncode == 130, text
    assert time.monotonic() - began < 5
    _wait_until_gone(tmp_path)
    assert len(rows_of(tmp_path / "run")) == 3
    assert '"interrupted": true' in (tmp_path / "run" / "run.json").read_text()


_PREPARING = """
import sys
from pathlib import Path
from harness.isolate import Kind, Launcher
from tests.tasks import task
launcher = Launcher(Path(sys.argv[1]))
launcher.start(task(folder=launcher.cell_folder()), Kind(prepare="tests.sample:prepare_slowly"))
print(launcher.scratch, flush=True)
launcher.wait(60)
"""


def test_a_runner_killed_while_its_server_prepares_leaves_neither_it_nor_a_compiler(tmp_path: Path) -> None:
    """Nobody reads the line's end of file then; the server sat there until its compiler was done."""
    runner = subprocess.Popen(
        [sys.executable, "-c", _PREPARING, str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "HARNESS_TEST": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert runner.stdout is not None
    scratch = Path(runner.stdout.readline().strip())
    limit = time.monotonic() + 20
    while "sleep" not in {process.name() for process in processes_of(tmp_path)}:
        assert time.monotonic() < limit, "the preparation never began"
        time.sleep(0.05)
    runner.kill()
    runner.wait()
    _wait_until_gone(tmp_path)
    assert not scratch.exists()
