"""What is the same for every cold cell on a CPU is done once, and nothing else passes from cell to cell."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from probes import inductor_once
from tests.conftest import ROOT

# A server as harness.server is one, with two forked cells that compile the same training step one after the other.
SERVER = """
import json, os, sys, tempfile
from pathlib import Path
import torch, torch._dynamo, torch._inductor.compile_fx
from torch._dynamo.utils import counters
from probes import inductor_once

run = Path(sys.argv[1])
prepared = inductor_once.prepare(str(run / "shared"))
(run / "server.json").write_text(json.dumps({"prepared": prepared, "counters": counters}))
(run / "g++.log").rename(run / "server.log")

def cell(folder):
    os.environ.update(TORCHINDUCTOR_CACHE_DIR=str(folder / "cache"), TMPDIR=str(folder))
    tempfile.tempdir = None
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
    x = torch.randn(4, 16)
    model(x).square().mean().backward()
    eager = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    torch.compile(model)(x).square().mean().backward()
    error = max(float((p.grad - g).abs().max()) for p, g in zip(model.parameters(), eager))
    maps = Path("/proc/self/maps").read_text().split()
    found = {
        "counters": counters,
        "error": error,
        "loaded": sorted({m for m in maps if m.startswith(str(run)) and m.endswith(".so")}),
        "compiled": sorted(str(p) for p in (folder / "cache").rglob("*.so")),
    }
    (folder / "found.json").write_text(json.dumps(found))

for name in ("one", "two"):
    folder = run / name
    folder.mkdir()
    pid = os.fork()
    if not pid:
        try:
            cell(folder)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    (run / "g++.log").rename(folder / "g++.log")
"""
COMPILER = """#!/bin/sh
echo "$@" >> {log}
exec {real} "$@"
"""


def snapshot(folder: Path) -> dict[str, tuple[int, int, int]]:
    files = [p for p in folder.rglob("*") if p.is_file()]
    return {str(p): (p.stat().st_mtime_ns, p.stat().st_size, p.stat().st_mode) for p in files}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run whose server and two cells have ended; every call of the compiler is logged."""
    real = shutil.which("g++")
    if real is None:
        pytest.skip("no g++")
    folder = tmp_path_factory.mktemp("run")
    for name in ("shared", "bin"):
        (folder / name).mkdir()
    compiler = folder / "bin" / "g++"
    compiler.write_text(COMPILER.format(log=folder / "g++.log", real=real))
    compiler.chmod(0o755)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("TORCH", "CXX"))}
    env = clean | {
        "PATH": f"{compiler.parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "TMPDIR": str(folder / "shared"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "shared"),
    }
    subprocess.run([sys.executable, "-c", SERVER, str(folder)], env=env, check=True, timeout=300)
    return folder


def found(run: Path, cell: str) -> dict[str, object]:
    return json.loads((run / cell / "found.json").read_text())


def compiler_calls(log: Path) -> list[str]:
    return [line for line in log.read_text().splitlines() if line not in ("--version", "-v")]


@pytest.mark.slow
def test_the_server_probes_and_builds_the_header_in_the_runs_own_folder(run: Path) -> None:
    server = json.loads((run / "server.json").read_text())
    assert list(server["prepared"]) == ["instruction sets", "precompiled header"]
    assert all(seconds > 0 for seconds in server["prepared"].values())
    assert not any(server["counters"].values()), "a server that has compiled is not fresh"
    headers = list((run / "shared").rglob("*.[gp]ch"))
    assert len(headers) == 1
    assert headers[0].stat().st_size > 10e6
    assert "-o " + str(headers[0]) in (run / "server.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("cell", ["one", "two"])
def test_a_cell_calls_the_compiler_for_its_own_kernels_alone(run: Path, cell: str) -> None:
    header = str(next((run / "shared").rglob("*.[gp]ch"))).rpartition(".")[0]
    calls = compiler_calls(run / cell / "g++.log")
    assert len(calls) == len(found(run, cell)["compiled"]) > 0
    for call in calls:
        assert f"-include {header}" in call, "compiled without the shared header"
        assert f"-o {run / cell / 'cache'}" in call, "compiled something that is not this cell's"


@pytest.mark.slow
def test_no_kernel_passes_from_one_cell_to_the_next(run: Path) -> None:
    one, two = found(run, "one"), found(run, "two")
    for cell in (one, two):
        inductor, autograd = cell["counters"]["inductor"], cell["counters"]["aot_autograd"]
        assert inductor["fxgraph_cache_miss"] == 2, "forward and backward, both compiled here"
        assert "fxgraph_cache_hit" not in inductor
        assert "autograd_cache_hit" not in autograd
        assert cell["error"] < 1e-6
    assert len(one["compiled"]) == len(two["compiled"])
    assert not set(one["compiled"]) & set(two["compiled"])
    for name, cell in (("one", one), ("two", two)):
        assert cell["loaded"], "the compiled kernels ran"
        assert all(path.startswith(f"{run}/{name}/") for path in cell["loaded"])


@pytest.mark.slow
def test_cells_leave_the_shared_folder_as_it_was(run: Path) -> None:
    newest = max(mtime for mtime, _, _ in snapshot(run / "shared").values())
    assert newest <= (run / "server.json").stat().st_mtime_ns
    for path, (_, _, mode) in snapshot(run / "shared").items():
        assert path.endswith(".lock") or not stat.S_IMODE(mode) & 0o222, path


def test_a_torch_without_these_private_names_leaves_the_work_to_the_cells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("torch._inductor.cpu_vec_isa.valid_vec_isa_list")
    monkeypatch.delattr("torch._inductor.codecache._HEADER_DIR")
    notes = inductor_once.prepare(str(tmp_path))
    assert list(notes.values()) == [0.0, 0.0]
    assert [note.split(":")[0] for note in notes] == [
        "instruction sets left to each cell",
        "precompiled header left to each cell",
    ]


def test_a_header_that_would_lie_outside_the_run_is_left_to_the_cells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor import codecache, cpu_vec_isa

    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", list)
    monkeypatch.setattr(codecache, "_HEADER_DIR", "/elsewhere/precompiled_headers")
    done = inductor_once.prepare(str(tmp_path))
    assert next(iter(done)) == "instruction sets"
    assert "this process keeps it in /elsewhere" in list(done)[1]


def test_a_machine_without_a_compiler_is_told_and_nothing_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor import codecache, cpu_vec_isa, exc

    def none(*_: object) -> None:
        raise exc.InvalidCxxCompiler

    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", list)
    monkeypatch.setattr(codecache, "_HEADER_DIR", str(tmp_path / "precompiled_headers"))
    monkeypatch.setattr(codecache.CppPythonBindingsCodeCache, "load_pybinding_async", none)
    assert "left to each cell: InvalidCxxCompiler" in list(inductor_once.prepare(str(tmp_path)))[1]
