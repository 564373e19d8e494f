"""triton-lowering: what is read from a compiled kernel, from a user's file, and from a compiler that refuses or dies."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from harness.suite import SUITES
from probes import triton_lowering
from probes.triton_lowering import sources
from probes.triton_lowering.work import triton_folder
from tests.conftest import ROOT, Ran, rows_of
from tests.test_cli import harness

WHEELS = sorted(path.name for path in (ROOT / ".triton").glob("*") if (path / "triton").is_dir())
HERE = "installed" if importlib.util.find_spec("triton") else next(reversed(WHEELS), "")
needs_triton = pytest.mark.skipif(
    not HERE, reason="no Triton here: pip install --target .triton/3.7.1 triton==3.7.1"
)
HEAD = 'schema = 1\ntitle = "t"\nprobe = "triton-lowering"\ndevice = "cpu"\n[fixed]\n'


@pytest.fixture
def kernels(tmp_path: Path) -> Callable[[str], Path]:
    def write(signatures: str, more: str = "") -> Path:
        path = tmp_path / "mine.py"
        path.write_text(
            f"import triton\nimport triton.language as tl\n\nSIGNATURES = {signatures}\n\n\n"
            "@triton.jit\ndef add(x_ptr, n, BLOCK: tl.constexpr):\n"
            "    at = tl.arange(0, BLOCK)\n    tl.store(x_ptr + at, tl.load(x_ptr + at, mask=at < n) + 1, mask=at < n)\n"
            f"{more}"
        )
        return path

    return write


WRONG = {
    "no SIGNATURES": ("0  # none\nX = 1", "must be a literal dict"),
    "empty": ("{}", "SIGNATURES is empty"),
    "a type that is none": ('{"add": "*fp17, i32, 64"}', "'*fp17': write a type"),
    "a hint that is none": ('{"add": "*fp16:8, i32, 64"}', "'*fp16:8': write a type"),
    "an option that is none": ('{"add": "*fp16, i32, 64; warps=4"}', "after ';' allowed is num_warps=N"),
}


@pytest.mark.parametrize(("signatures", "message"), WRONG.values(), ids=WRONG)
def test_a_file_that_is_wrong_is_one_message(
    kernels: Callable[[str], Path], signatures: str, message: str
) -> None:
    path = kernels(signatures)
    with pytest.raises(ValueError, match="mine.py") as told:
        _all_arguments(path)
    assert message in str(told.value)


def _all_arguments(path: Path) -> None:
    for kernel in sources.listed(path):
        sources.arguments(kernel, "fp16", 64)


def test_a_file_names_its_kernels_and_says_which_it_leaves_out(kernels: Callable[..., Path]) -> None:
    path = kernels(
        '{"add": "*{dtype}:16, i32, {size}; num_warps=8"}', "@triton.jit\ndef helper(x):\n    return x\n"
    )
    assert triton_lowering.names(path) == [f"{path}::add"]
    assert triton_lowering.open_axes(f"{path}::add") == {"dtype": ["fp16", "bf16", "fp32"], "size": [64]}
    assert triton_lowering.left_out(path).endswith("helper")
    kernel = sources.find(f"{path}::add")
    assert kernel.options == {"num_warps": 8}
    kind, n, block = sources.arguments(kernel, "bf16", 32)
    assert (kind.type, kind.aligned, n.type, n.aligned, block.constant) == ("*bf16", True, "i32", False, 32)


def test_an_axis_that_would_change_nothing_is_refused_with_the_reason(kernels: Callable[..., Path]) -> None:
    path = kernels('{"add": "*fp16, i32, 64"}')
    name = f"{path}::add"
    axes = triton_lowering.LoweringAxes
    assert "dtype=fp16 would change nothing" in triton_lowering.skip(axes(kernel=name, dtype="fp16"), "cpu")
    assert "size=32 would change nothing" in triton_lowering.skip(axes(kernel=name, size=32), "cpu")
    assert "leaves the dtype open" in triton_lowering.skip(axes(kernel="dot", size=64), "cpu")
    assert triton_lowering.skip(axes(kernel=name), "cpu") == ""


def test_a_folder_without_triton_ir_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="TRITON_CACHE_DIR="):
        sources.listed(tmp_path)


def test_wrong_words_on_the_command_line_are_one_message() -> None:
    done = harness("triton-lowering", "kernel=dott", module="harness.probe")
    assert (done.returncode, "unknown kernel 'dott'; built in: pointwise" in done.stderr) == (2, True)
    done = harness("fault-drill", "--file", "README.md", module="harness.probe")
    assert (done.returncode, "fault-drill takes no file" in done.stderr) == (2, True)


def test_the_kernels_of_a_file_are_cells_with_the_axes_they_leave_open(tmp_path: Path) -> None:
    file = "probes/triton_lowering/builtin.py"
    asked = ("triton-lowering", "--file", file, "dtype=fp16", "triton=0.0.1", "--out", str(tmp_path / "run"))
    done = harness(*asked, module="harness.probe")
    assert done.returncode == 1, done.stderr
    rows = rows_of(tmp_path / "run")
    assert {(str(r.axes["kernel"]).split("::")[-1], r.axes["dtype"], r.axes["size"]) for r in rows} == {
        (name, "fp16", 64) for name in sources.builtin_names()
    }
    assert {r.status for r in rows} == {"unsupported"}
    done = harness("triton-lowering", "--file", file, "kernel=dot", module="harness.probe")
    assert (done.returncode, "decides it already; give one of the two" in done.stderr) == (2, True)


def test_a_triton_that_is_not_there_is_named_with_the_command_that_gets_it(
    run_suite: Callable[..., Ran],
) -> None:
    ran = run_suite(
        HEAD + 'kernel = "dot"\ndtype = "fp16"\nsize = 64\ntriton = "0.0.1"\n', triton_lowering.PROBE
    )
    assert ran.rows[0].status == "unsupported"
    assert "pip install --no-deps --target .triton/0.0.1 triton==0.0.1" in ran.rows[0].reason
    assert ran.outcome.exit_code == 1
    assert bool(triton_folder("installed")[1]) != bool(importlib.util.find_spec("triton"))


@needs_triton
def test_volta_gets_scalar_dots_where_ampere_gets_tensor_cores(run_suite: Callable[..., Ran]) -> None:
    ran = run_suite(
        HEAD.replace("[fixed]", "[axes]")
        + f'kernel = ["dot", "pointwise"]\ntarget = ["sm_70", "sm_80"]\ndtype = ["bf16"]\nsize = [16]\ntriton = ["{HERE}"]\n',
        triton_lowering.PROBE,
    )
    volta, ampere = (ran.row(kernel="dot", target=target).facts for target in ("sm_70", "sm_80"))
    assert volta["matrix_instructions"] == 0
    assert volta["fma"] == 64 * 64 * 16 // 128
    assert "mma.sync" in str(ampere["dots"])
    assert (volta["bf16_instructions"], bool(ampere["bf16_instructions"])) == (0, True)
    assert volta["cubin_bytes"] > ampere["cubin_bytes"]
    assert ran.row(kernel="pointwise", target="sm_70").verdict == "ok"
    assert ran.row(kernel="pointwise", target="sm_70").facts["registers"] > 0


@needs_triton
def test_kernels_of_a_users_file_and_of_a_triton_cache_are_lowered(
    run_suite: Callable[..., Ran], kernels: Callable[[str], Path], tmp_path: Path
) -> None:
    path = kernels('{"add": "*fp16:16, i32, 64; num_warps=2", "absent": "i32"}')
    cells = f'kernel = ["{path}::add", "{path}::absent"]\nnum_warps = [0, 8]\ntriton = ["{HERE}"]\n'
    ran = run_suite(HEAD.replace("[fixed]", "[axes]") + cells, triton_lowering.PROBE)
    assert ran.row(kernel=f"{path}::add", num_warps=0).facts["num_warps"] == 2
    assert ran.row(kernel=f"{path}::add", num_warps=8).facts["num_warps"] == 8
    absent = ran.row(kernel=f"{path}::absent", num_warps=0)
    assert (absent.status, "absent" in absent.reason) == ("error", True)


@needs_triton
def test_kernels_captured_from_a_runs_triton_cache_are_lowered_for_another_target(
    run_suite: Callable[..., Ran], tmp_path: Path
) -> None:
    cache = _cache_of_a_run(tmp_path)
    (name,) = triton_lowering.names(cache)
    assert triton_lowering.open_axes(name) == {}
    cells = f'kernel = ["{name}"]\ntarget = ["sm_70", "sm_80"]\ntriton = ["{HERE}"]\n'
    ran = run_suite(HEAD.replace("[fixed]", "[axes]") + cells, triton_lowering.PROBE)
    volta, ampere = ran.row(target="sm_70"), ran.row(target="sm_80")
    assert (volta.verdict, volta.facts["fma"]) == ("caveat", 64 * 64 * 16 // 256)
    assert "mma.sync" in str(ampere.facts["dots"])
    assert volta.facts["num_warps"] == 8


def _cache_of_a_run(tmp_path: Path) -> Path:
    """What Triton leaves in TRITON_CACHE_DIR: here of the built-in dot, compiled for sm_90 with eight warps."""
    dot = sources.find("dot")
    spec = {
        "file": str(dot.file),
        "kernel": "dot",
        "arguments": sources.arguments(dot, "fp16", 16),
        "target": 90,
        "options": {"num_warps": 8},
    }
    (tmp_path / "spec.json").write_bytes(msgspec.json.encode(spec))
    cache, made = tmp_path / "cache", tmp_path / "made"
    made.mkdir()
    env = {**os.environ, "TRITON_CACHE_DIR": str(cache), "PYTHONPATH": triton_folder(HERE)[0]}
    worker = str(Path(triton_lowering.__file__).with_name("lower.py"))
    subprocess.run([sys.executable, worker, str(tmp_path / "spec.json"), str(made)], env=env, check=True)
    return cache


@needs_triton
def test_a_kernel_that_needs_more_shared_memory_than_the_card_has_is_unsupported(
    run_suite: Callable[..., Ran], tmp_path: Path
) -> None:
    path = tmp_path / "wide.py"
    path.write_text(WIDE)
    ran = run_suite(
        HEAD + f'kernel = "{path}::dot"\ntarget = "sm_75"\ntriton = "{HERE}"\n', triton_lowering.PROBE
    )
    (row,) = ran.rows
    assert row.status == "unsupported"
    assert "98,304 bytes of shared memory; a block of sm_75 has 65,536" in row.reason
    assert row.facts["cubin_bytes"]


WIDE = f"""
import importlib.util
spec = importlib.util.spec_from_file_location("builtin", {str(sources.BUILTIN)!r})
builtin = importlib.util.module_from_spec(spec)
spec.loader.exec_module(builtin)
dot = builtin.dot
SIGNATURES = {{"dot": "*fp32:16, *fp32:16, *fp32:16, 16, 32, 512; num_warps=16"}}
"""


@pytest.mark.skipif("3.2.0" not in WHEELS, reason="no Triton 3.2.0 in .triton, whose compiler aborts")
def test_a_compiler_that_aborts_is_a_row_with_its_last_words(run_suite: Callable[..., Ran]) -> None:
    cells = 'kernel = ["dot_reduce", "pointwise"]\ndtype = ["fp16"]\nsize = [64]\ntriton = ["3.2.0"]\n'
    ran = run_suite(HEAD.replace("[fixed]", "[axes]") + cells, triton_lowering.PROBE)
    died = ran.row(kernel="dot_reduce")
    assert died.status == "crashed"
    assert "the compiler died of SIGABRT: LLVM ERROR" in died.reason
    assert any("LLVM ERROR" in line for line in died.log_tail)
    assert ran.row(kernel="pointwise").status == "ok"


def test_a_compiler_process_that_dies_is_a_row_with_its_last_words(
    run_suite: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above, without any Triton: one that aborts when it is imported stands in."""
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton/__init__.py").write_text(ABORTS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    ran = run_suite(HEAD + 'kernel = "dot"\ndtype = "fp16"\nsize = 64\n', triton_lowering.PROBE)
    (row,) = ran.rows
    assert (row.status, row.reason) == ("crashed", "the compiler died of SIGABRT: LLVM ERROR: no such layout")
    assert row.log_tail[-1] == "LLVM ERROR: no such layout"


ABORTS = """
import os, sys
if sys.argv[0].endswith("lower.py"):
    print("LLVM ERROR: no such layout", file=sys.stderr, flush=True)
    os.abort()
"""


def test_the_suite_lowers_every_built_in_kernel() -> None:
    text = (SUITES / "triton-lowering.toml").read_text()
    assert all(f'"{name}"' in text for name in sources.builtin_names())


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_kernels_of_an_inductor_run_are_lowered_for_volta(
    run_suite: Callable[..., Ran], tmp_path: Path
) -> None:
    code = "import torch; f = torch.compile(lambda x: torch.softmax(x.relu(), -1)); f(torch.ones(64, 64, device='cuda'))"
    env = {
        **os.environ,
        "TRITON_CACHE_DIR": str(tmp_path / "kernels"),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "c"),
    }
    subprocess.run([sys.executable, "-c", code], env=env, check=True)
    names = triton_lowering.names(tmp_path / "kernels")
    assert names
    ran = run_suite(HEAD.replace("[fixed]", "[axes]") + f"kernel = {names}\n", triton_lowering.PROBE)
    assert {row.status for row in ran.rows} == {"ok"}, [row.reason for row in ran.rows]
