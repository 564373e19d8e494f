"""volta-lowering: an emulation says that it is one, and its verdict stands only for kernels lowered as asked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from harness.rows import Result, Row
from probes import volta_lowering
from probes.volta_lowering import VoltaAxes
from probes.volta_lowering.evidence import lowered
from probes.volta_lowering.work import judged
from reports import matrix
from reports.load import Run
from reports.page import page
from tests.conftest import Ran

RIGHT = Result(verdict="ok", verdict_reason="12 tensors within their bars", notes=("loss scaled",))


@pytest.fixture
def cache(tmp_path: Path) -> Callable[..., Path]:
    """A folder as Triton keeps it, one kernel per name."""

    def write(name: str, lowered_for: int, *, dot: bool = False) -> Path:
        folder = tmp_path / "cache" / name
        folder.mkdir(parents=True)
        (folder / f"{name}.ttgir").write_text(
            f'module attributes {{"ttg.num-warps" = 4 : i32, ttg.target = "cuda:{lowered_for}"}} {{}}'
        )
        (folder / f"{name}.ptx").write_text(".version 8.7\n.target sm_90a\n\tfma.rn.f32 %f1, %f2;\n")
        ir = "%1 = tt.dot %a, %b : tensor<16x16xf16> * tensor<16x16xf16> -> tensor<16x16xf32>\n"
        (folder / f"{name}.ttir").write_text(ir if dot else "")
        return tmp_path / "cache"

    return write


def test_kernels_are_read_back_from_tritons_cache_each_once(cache: Callable[..., Path]) -> None:
    cache("sum", 70)
    folder = cache("mm", 70, dot=True)
    found = lowered([folder, folder / "mm"])
    assert (found.count, found.targets, found.assembled) == (2, ("70",), ("sm_90a",))
    assert (found.with_dots, found.matrix, found.fma) == (1, 0, 2)


def test_a_verdict_stands_only_where_every_kernel_was_lowered_as_asked(cache: Callable[..., Path]) -> None:
    folder = cache("sum", 70)
    held = judged(RIGHT, "sm70", lowered([folder]))
    assert (held.status, held.verdict) == ("ok", "ok")
    assert held.verdict_reason == "emulated sm_70: 12 tensors within their bars"
    assert held.notes[0].startswith("emulation: lowered as for sm_70 by TRITON_OVERRIDE_ARCH=sm70")
    assert held.notes[0] == held.facts["emulation"]
    assert judged(RIGHT, "sm75", lowered([folder])).status == "unsupported"
    both = judged(RIGHT, "sm70", lowered([cache("mm", 90)]))
    assert (both.status, both.verdict) == ("unsupported", None)
    assert "lowered for sm_70, sm_90" in both.reason


def test_a_run_without_a_kernel_is_no_pass(tmp_path: Path) -> None:
    held = judged(RIGHT, "sm70", lowered([tmp_path]))
    assert (held.status, "no Triton kernel in its cache" in held.reason) == ("unsupported", True)


def test_a_mismatch_keeps_its_verdict_and_a_failure_its_reason(cache: Callable[..., Path]) -> None:
    kernels = lowered([cache("sum", 70)])
    wrong = msgspec.structs.replace(RIGHT, verdict="mismatch", verdict_reason="q_proj.weight is off")
    assert judged(wrong, "sm70", kernels).verdict == "mismatch"
    failed = judged(Result(status="oom", reason="no memory"), "sm70", kernels)
    assert (failed.status, failed.reason, failed.notes[0][:9]) == ("oom", "no memory", "emulation")


def test_a_cpu_and_a_backend_without_code_are_skips_with_the_reason(run_suite: Callable[..., Ran]) -> None:
    head = 'schema = 1\ntitle = "t"\nprobe = "volta-lowering"\ndevice = "cpu"\n[fixed]\nmodel = "mlp"\n'
    ran = run_suite(head, volta_lowering.PROBE)
    assert ran.rows[0].status == "skipped"
    assert "triton-lowering needs no GPU" in ran.rows[0].reason
    assert "generates no code" in volta_lowering.skip(VoltaAxes(backend="aot_eager"), "cuda")
    assert volta_lowering.skip(VoltaAxes(), "cuda") == ""


def test_every_table_of_an_emulation_says_so() -> None:
    row = Row(
        suite="s",
        probe="volta-lowering",
        cell="0" * 16,
        device="cuda",
        axes={"model": "mlp", "mode": "default", "dtype": "fp16"},
        verdict="ok",
        verdict_reason="emulated sm_70: right",
    )
    assert matrix.markdown([row]).startswith(matrix.EMULATION)
    meta = {"schema": 1, "probe": "volta-lowering", "device": "cuda"}
    made = page([Run(name="s", title="t", meta=meta, rows=(row,))])
    tables = [section for section in made.sections if section.title.startswith("Verdicts of volta-lowering")]
    assert tables
    assert all(matrix.EMULATION in section.paragraphs for section in tables)
    plain = msgspec.structs.replace(row, probe="compile-matrix")
    assert matrix.EMULATION not in matrix.markdown([plain])


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_a_module_compiled_as_for_volta_is_right_on_this_card(
    run_suite: Callable[..., Ran], dtype: str
) -> None:
    head = 'schema = 1\ntitle = "t"\nprobe = "volta-lowering"\ndevice = "cuda"\n[measure]\nsteps = 2\n'
    ran = run_suite(f'{head}[fixed]\nmodel = "layer"\ndtype = "{dtype}"\n', volta_lowering.PROBE)
    (row,) = ran.rows
    assert row.status == "ok", row.reason
    assert row.verdict in ("ok", "caveat")
    assert (row.facts["lowered_for"], row.facts["matrix_instructions"]) == ("sm_70", 0)
    assert row.facts["kernels"] > 0


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_triton_gemm_lowered_as_for_volta_is_scalar_and_right(run_suite: Callable[..., Ran]) -> None:
    head = 'schema = 1\ntitle = "t"\nprobe = "volta-lowering"\ndevice = "cuda"\n[measure]\nsteps = 2\n'
    cell = '[fixed]\nmodel = "mlp"\ndtype = "fp16"\nmode = "max-autotune-no-cudagraphs"\n'
    (row,) = run_suite(head + cell, volta_lowering.PROBE).rows
    assert row.status == "ok", row.reason
    assert row.facts["matrix_instructions"] == 0
