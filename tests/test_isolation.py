"""A cell is alone: fresh process, own caches and seed, no behaviour flags of the caller."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil
import pytest

from harness import environ
from harness.isolate import Kind, Launcher
from tests.conftest import ROOT, Ran
from tests.sample import HEAD, PROBE


def test_behaviour_flags_do_not_leak_and_device_selection_passes(
    run_suite: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_LOGS", "all")
    monkeypatch.setenv("TORCHINDUCTOR_MAX_AUTOTUNE", "1")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:native")
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    ran = run_suite(HEAD + '[axes]\ndo = ["env"]\n')
    facts = ran.rows[0].facts
    assert (facts["TORCH_LOGS"], facts["TORCHINDUCTOR_MAX_AUTOTUNE"], facts["PYTORCH_CUDA_ALLOC_CONF"]) == (
        None,
    ) * 3
    assert (facts["CUDA_HOME"], facts["NCCL_DEBUG"]) == ("/nowhere", "INFO")
    run = msgspec.json.decode((ran.folder / "run.json").read_bytes())
    assert "TORCHINDUCTOR_MAX_AUTOTUNE" in run["notes"][0]
    recorded = next(iter(run["environments"].values()))["stack"]["env"]
    assert recorded["NCCL_DEBUG"] == "INFO"


@pytest.mark.parametrize("isolation", ["forkserver", "spawn"])
def test_a_suite_names_the_flags_it_wants(run_suite: Callable[..., Ran], isolation: str) -> None:
    flags = '[env]\nTORCHINDUCTOR_MAX_AUTOTUNE = "1"\nTRITON_OVERRIDE_ARCH = "sm70"\n'
    row = run_suite(HEAD + flags + '[axes]\ndo = ["env"]\n', isolation=isolation).rows[0]
    assert (row.facts["TORCHINDUCTOR_MAX_AUTOTUNE"], row.facts["TRITON_OVERRIDE_ARCH"]) == ("1", "sm70")
    assert row.isolation.method == isolation
    assert row.isolation.env == {"TORCHINDUCTOR_MAX_AUTOTUNE": "1", "TRITON_OVERRIDE_ARCH": "sm70"}


def test_each_cell_has_its_own_process_session_and_seed(run_suite: Callable[..., Ran]) -> None:
    toml = HEAD + 'seed = 7\nreplicates = 2\n[axes]\ndo = ["random"]\nn = [0, 1]\n'
    rows = run_suite(toml).rows
    assert len({r.facts["pid"] for r in rows}) == 4
    assert all(r.facts["pid"] == r.facts["sid"] == r.isolation.pid for r in rows)
    values = {(r.seed, r.facts["random"]) for r in rows}
    assert {seed for seed, _ in values} == {7, 8}
    assert len(values) == 2, "one seed, one stream: independent of what ran before"


def test_cold_caches_are_empty_for_each_cell_and_shared_ones_are_not(run_suite: Callable[..., Ran]) -> None:
    first = "empty at first"
    for cache, seen, said in (
        ("cold", [0, 0, 0, 0], {"cold"}),
        ("shared", [0, 1, 2, 2], {"shared", f"shared, {first}"}),
        ("warm", [0, 0, 1, 1], {"warm", f"warm, {first}"}),
    ):
        head = HEAD + f'replicates = 2\nmeasure = {{ cache = "{cache}" }}\n'
        rows = run_suite(head + '[axes]\ndo = ["caches"]\nn = [0, 1]\n', name=cache, fresh=True).rows
        assert sorted(r.facts["seen"] for r in rows) == seen, cache
        assert {r.isolation.cache for r in rows} == said
        assert all((r.facts["seen"] == 0) == (first in r.isolation.cache) for r in rows if cache != "cold")


def test_a_preload_that_fails_makes_cells_cold_and_the_row_says_why(run_suite: Callable[..., Ran]) -> None:
    probe = msgspec.structs.replace(PROBE, preload=("tests.sample", "no_such_module"))
    row = run_suite(HEAD + "[axes]\nn = [0]\n", probe).rows[0]
    assert (row.status, row.isolation.method) == ("ok", "spawn")
    assert (
        row.isolation.reason
        == "preload of no_such_module failed: ModuleNotFoundError: No module named 'no_such_module'"
    )


def test_a_fork_that_is_not_fresh_is_run_cold_and_the_row_says_why(
    run_suite: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "poison.py").write_text(
        "import torch\ntorch.cuda.is_initialized = lambda: True\n"  # as a preload that touched CUDA
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    probe = msgspec.structs.replace(PROBE, preload=("tests.sample", "poison"))
    row = run_suite(HEAD + "[axes]\nn = [0]\n", probe).rows[0]
    assert (row.status, row.isolation.method) == ("ok", "spawn")
    assert row.isolation.reason == "CUDA is initialised in the server"


def test_the_child_itself_refuses_to_run_stale(
    run_suite: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "late_poison.py").write_text(
        "import os, torch\n"
        "home = os.getpid()\n"  # clean in the server, seen only in the fork
        "torch.cuda.is_initialized = lambda: os.getpid() != home\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    probe = msgspec.structs.replace(PROBE, preload=("tests.sample", "late_poison"))
    row = run_suite(HEAD + "[axes]\nn = [0]\n", probe).rows[0]
    assert (row.status, row.isolation.method) == ("ok", "spawn")
    assert "CUDA is initialised" in row.isolation.reason


def test_jobs_run_verdict_only_cells_side_by_side_and_timed_cells_run_alone(
    run_suite: Callable[..., Ran],
) -> None:
    toml = HEAD + '[axes]\ndo = ["sleep"]\ns = [0.5]\nn = [0, 1, 2, 3]\n'
    began = time.monotonic()
    rows = run_suite(toml, jobs=4, name="untimed").rows
    assert time.monotonic() - began < 1.9
    assert all(len(r.isolation.neighbours) >= 1 for r in rows)
    timed = msgspec.structs.replace(PROBE, timed=True)
    rows = run_suite(toml, timed, jobs=4, name="timed", fresh=True).rows
    assert all(r.isolation.neighbours == () for r in rows)


def test_a_thousand_cells_leave_the_parent_as_small_as_it_was(tmp_path: Path) -> None:
    code = (
        "import io, sys, time, psutil, pathlib\n"
        "from rich.console import Console\n"
        "from harness import session, suite\n"
        "from tests.sample import HEAD, TABLE\n"
        "def run(n, name):\n"
        "    parsed = suite.parse(HEAD + f'[axes]\\nn = {list(range(n))}\\n', 't.toml', TABLE)\n"
        f"    out = pathlib.Path({str(tmp_path)!r}) / name\n"
        "    session.execute(parsed, session.Options(out=out), Console(file=io.StringIO()))\n"
        "run(100, 'a'); before = psutil.Process().memory_info().rss\n"
        "began = time.monotonic(); cpu = time.process_time(); run(1000, 'b')\n"
        "print(1000 / (time.monotonic() - began), psutil.Process().memory_info().rss - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    rate, grown = (float(word) for word in done.stdout.split())
    print(f"{rate:.0f} cells/s, parent grew by {grown / 2**20:.1f} MiB")
    assert rate > 8
    assert grown < 20 << 20


def test_the_parent_sleeps_while_a_cell_runs(run_suite: Callable[..., Ran]) -> None:
    before = time.process_time()
    run_suite(HEAD + '[axes]\ndo = ["sleep"]\ns = [3.0]\n')
    assert time.process_time() - before < 0.5


def test_early_read_flags_select_a_server_of_their_own(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path)
    try:
        kinds = [Kind(env=()), Kind(env=(("TORCHINDUCTOR_COMPILE_THREADS", "1"),)), Kind(env=())]
        servers = {id(launcher._server(kind)) for kind in kinds}
        assert len(servers) == 2
    finally:
        launcher.close()
    assert not [p for p in psutil.Process().children() if p.is_running() and p.status() != "zombie"]


@pytest.mark.parametrize("name", sorted(environ.LATE_READ - {"TRITON_OVERRIDE_ARCH"}))
def test_a_variable_on_the_late_read_list_has_its_effect_after_torch_was_imported(
    name: str, tmp_path: Path
) -> None:
    reads = {
        "TORCHINDUCTOR_CACHE_DIR": "from torch._inductor.runtime.cache_dir_utils import cache_dir; got = cache_dir()",
        "TRITON_CACHE_DIR": "got = os.environ['TRITON_CACHE_DIR']"
        if not _has_triton()
        else "import triton; got = triton.knobs.cache.dir",
        "TMPDIR": "import tempfile; tempfile.tempdir = None; got = tempfile.gettempdir()",
        "CUDA_VISIBLE_DEVICES": "got = os.environ['CUDA_VISIBLE_DEVICES']; assert not torch.cuda.is_initialized()",
    }
    value = str(tmp_path) if "DIR" in name else "0"
    code = (
        "import os, torch, torch._inductor.compile_fx\n"
        f"os.environ[{name!r}] = {value!r}\n{reads[name]}\nassert got == {value!r}, got\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-800:]


def _has_triton() -> bool:
    import importlib.util

    return importlib.util.find_spec("triton") is not None
