"""One training step on a GPU: device-timed steps, peaks, the kernel that ran, and memory that runs out."""

from __future__ import annotations

import msgspec
import pytest
import torch

from harness.cells import Measure, Task
from harness.rows import Result
from probes.train_step import PROBE, TrainStepAxes, check
from probes.train_step.work import run

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def cell(*, steps: int = 4, **axes: object) -> Result:
    """One cell in this process, on the first GPU."""
    defaults = {"model": "tiny-qwen2-6h", "seq": 256, "dtype": "fp16"}
    chosen = msgspec.convert({**defaults, **axes}, TrainStepAxes)
    task = Task(
        id="t",
        work=PROBE.work,
        axes={},
        device="cuda",
        measure=Measure(steps=steps, warmup_steps=1),
        seed=0,
        folder="",
        result_path="",
        log_path="",
    )
    return run(chosen, task)


@pytest.mark.parametrize("attention", ["eager", "sdpa", "math", "efficient", "xformers", "flash", "cudnn"])
def test_each_kernel_is_measured_seen_and_checked_or_refused_with_a_reason(attention: str) -> None:
    found = cell(attention=attention)
    if found.status == "unsupported" and attention in ("xformers", "flash", "cudnn"):
        assert found.reason
        return
    assert found.status == "ok", found.reason
    assert len(found.step_s) == 4
    assert all(s and s > 0 for s in found.step_s)
    assert found.memory.allocated_peak_bytes
    assert found.memory.compile_reserved_peak_bytes
    assert found.attention
    assert found.attention.honoured
    assert found.verdict in ("ok", "caveat"), found.verdict_reason


@pytest.mark.parametrize("attention", ["flash", "efficient", "math"])
def test_a_real_model_is_measured_with_the_kernel_that_was_asked_for(attention: str) -> None:
    found = cell(model="qwen2.5-0.5b", seq=512, attention=attention)
    if found.status == "unsupported" and attention == "flash":  # needs sm_80
        assert found.reason
        return
    assert found.status == "ok", found.reason
    assert found.attention
    assert (found.attention.ran, found.attention.honoured) == (attention, True)
    assert found.attention.source.startswith("profiler: ")
    assert found.verdict in ("ok", "caveat"), found.verdict_reason
    peaks = found.memory
    assert peaks.allocated_peak_bytes
    assert peaks.reserved_peak_bytes
    assert peaks.reserved_peak_bytes >= peaks.allocated_peak_bytes > 2 * 2 * 494_032_768  # weights, gradients
    assert found.device_before
    assert found.device_after


def test_a_small_model_has_a_float64_reference_and_a_large_one_float32() -> None:
    small = cell(attention="efficient").parity
    large = cell(attention="efficient", model="qwen2.5-0.5b", seq=1024, checkpointing=True).parity
    assert small
    assert small.reference.startswith("float64")
    assert large
    assert large.reference.startswith("float32")
    assert large.verdict in ("ok", "caveat"), large.reason


def test_gradients_kept_on_the_host_give_the_same_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    there = cell(attention="efficient").parity
    monkeypatch.setattr(check, "_roomy", lambda training: False)
    host = cell(attention="efficient").parity
    assert there
    assert host
    assert (host.verdict, host.tensors) == (there.verdict, there.tensors)


def test_cudagraphs_leave_losses_and_gradients_right() -> None:
    """The reference system's reduce-overhead gave right outputs and gradients of cosine 0."""
    found = cell(attention="efficient", compile="layers", mode="reduce-overhead")
    assert found.status == "ok", found.reason
    assert len(set(found.loss)) == 1  # no weight changes, so no loss does
    assert found.verdict in ("ok", "caveat"), found.verdict_reason
    assert found.compile
    if torch.cuda.get_device_capability() > (7, 0):  # on sm_70 the policy turns them off
        assert found.compile.cudagraphs or found.compile.cudagraph_skips


def test_memory_that_runs_out_is_oom_with_what_was_asked_and_the_next_cell_runs() -> None:
    try:
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(0.02)
        found = cell(attention="math", seq=16_384)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert found.status == "oom"
    assert "Tried to allocate" in found.reason
    assert found.memory.compile_allocated_peak_bytes
    assert cell(attention="math").status == "ok"


def test_clocks_and_power_are_noted_before_and_after() -> None:
    found = cell(attention="sdpa")
    assert found.device_before
    assert found.device_after
    assert found.device_after.sm_clock_mhz
    assert found.device_after.power_limit_w


def test_amp_in_fp16_takes_full_steps() -> None:
    found = cell(attention="efficient", precision="amp", step="full", optimizer="adamw", steps=6)
    assert found.status == "ok", found.reason
    assert found.verdict in ("ok", "caveat"), found.verdict_reason
    assert found.loss[-1] < found.loss[0]  # type: ignore[operator]
