"""One training step on a CPU: what is measured, what is refused, what is kept when it fails."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from harness.cells import Measure
from harness.rows import Result
from probes.models import PRESETS
from probes.train_step import PROBE, TrainStepAxes, work
from probes.train_step import check as check_module
from probes.train_step import training as training_module
from probes.train_step.work import run
from tc_volta import KERNELS, Unsupported
from tests.conftest import ROOT
from tests.tasks import task


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads that wait for each other on a busy machine make a small model 50 times slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def cell(
    *, check: bool = True, steps: int = 2, warmup_steps: int = 1, seed: int = 0, **axes: object
) -> Result:
    """One cell in this process, on a CPU."""
    chosen = msgspec.convert({"model": "tiny-qwen2-4h", "seq": 32, **axes}, TrainStepAxes)
    measure = Measure(steps=steps, warmup_steps=warmup_steps, check=check)
    return run(chosen, task(measure=measure, seed=seed))


def test_the_declaration_imports_no_torch() -> None:
    code = "import sys, probes.train_step; sys.exit(any(m in sys.modules for m in ('torch', 'numpy', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_a_row_has_every_sample_and_the_first_step_apart() -> None:
    found = cell(attention="sdpa", steps=3, warmup_steps=2)
    assert found.status == "ok"
    assert len(found.step_s) == 3
    assert len(found.loss) == 1 + 2 + 3
    assert found.first_step_s
    assert found.first_step_s > 0
    assert found.tokens_per_step == 32
    assert found.memory.host_peak_bytes
    assert found.memory.host_peak_bytes > 50 << 20
    assert found.compile is None
    assert found.peak_flops_per_s is None
    assert "this CPU" in found.peak_source


@pytest.mark.parametrize(
    ("attention", "ran"), [("eager", "math"), ("sdpa", "flash"), ("math", "math"), ("flash", "flash")]
)
def test_the_kernel_in_the_row_is_the_one_that_ran(attention: str, ran: str) -> None:
    found = cell(attention=attention)
    assert found.attention
    assert (found.attention.ran, found.attention.honoured) == (ran, True)
    assert sum(found.attention.evidence.values()) >= 4  # two layers, forward and backward
    assert found.verdict == "ok"


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("attention", ["eager", "sdpa", "math", "flash"])
def test_half_precision_is_right_with_every_kernel_of_a_cpu(attention: str, dtype: str) -> None:
    found = cell(attention=attention, dtype=dtype)
    assert found.status == "ok"
    assert found.attention
    assert found.attention.honoured
    assert found.verdict in ("ok", "caveat"), found.verdict_reason


@pytest.mark.parametrize(
    "spoil",
    [
        lambda dq, dk, dv: (dq, dk * 1.5, dv),
        lambda dq, dk, dv: (torch.zeros_like(dq), dk, dv),
        lambda dq, dk, dv: (dq, dk, -dv),
    ],
    ids=["dk too long", "no dq", "dv turned round"],
)
def test_a_kernel_whose_backward_is_wrong_is_a_mismatch_that_names_a_tensor(
    spoil: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = KERNELS["flash"]
    wrong = dataclasses.replace(right, backward=lambda dout, saved: spoil(*right.backward(dout, saved)))
    monkeypatch.setitem(KERNELS, "flash", wrong)
    found = cell(attention="flash")
    assert (found.status, found.verdict) == ("ok", "mismatch")
    assert found.parity
    assert found.parity.worst[0].name in found.verdict_reason
    assert "self_attn" in found.verdict_reason
    assert len(found.step_s) == 2


@pytest.mark.parametrize("model", ["tiny-qwen2-12h", "tiny-qwen3-6h", "tiny-llama-4h"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_class_is_checked_against_float64(model: str, dtype: str) -> None:
    found = cell(model=model, attention="flash", dtype=dtype, checkpointing=True)
    assert found.parity
    assert found.parity.reference.startswith("float64")
    assert found.verdict in ("ok", "caveat"), found.verdict_reason
    assert found.parity.tensors == sum(
        1 for _ in training_module.build(model, device="cpu", dtype=torch.float32).parameters()
    )


@pytest.mark.parametrize(("dtype", "scaled"), [("fp16", True), ("bf16", False)])
def test_amp_trains_float32_parameters_and_is_checked(dtype: str, scaled: bool) -> None:
    found = cell(attention="flash", dtype=dtype, precision="amp", step="full", optimizer="adamw", steps=4)
    assert found.status == "ok"
    assert found.verdict in ("ok", "caveat"), found.verdict_reason
    assert found.loss[-1] < found.loss[0]  # type: ignore[operator]
    assert found.parity
    assert ("scaled by 1024" in found.parity.reference) == scaled


def test_a_forward_and_backward_changes_no_weight_and_a_full_step_does() -> None:
    plain = cell(attention="sdpa", check=False)
    full = cell(attention="sdpa", check=False, step="full", optimizer="adamw")
    assert len(set(plain.loss)) == 1
    assert len(set(full.loss)) == len(full.loss)
    assert plain.loss[0] == full.loss[0]


def test_the_seed_decides_the_weights() -> None:
    one, again, other = (cell(attention="sdpa", check=False, seed=s).loss[0] for s in (1, 1, 2))
    assert one == again
    assert one != other


def test_without_a_check_there_is_no_verdict() -> None:
    found = cell(attention="sdpa", check=False)
    assert (found.verdict, found.parity) == (None, None)


def test_a_kernel_for_another_device_is_unsupported_with_the_reason() -> None:
    found = cell(attention="efficient")
    assert found.status == "unsupported"
    assert "CUDA" in found.reason
    assert found.step_s == ()


def test_a_kernel_that_did_not_run_is_unsupported_and_the_timing_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(training_module.tc_volta, "attention_name", lambda kernel: "eager")
    found = cell(attention="flash")
    assert found.status == "unsupported"
    assert found.reason.startswith("asked for flash, math ran: ")
    assert "aten::bmm" in found.reason
    assert len(found.step_s) == 2


def test_a_kernel_that_refuses_a_call_is_unsupported_in_its_own_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> object:
        raise Unsupported("head dim 512; this kernel takes at most 256")

    monkeypatch.setitem(KERNELS, "flash", dataclasses.replace(KERNELS["flash"], forward=refuse))
    found = cell(attention="flash")
    assert (found.status, found.reason) == ("unsupported", "head dim 512; this kernel takes at most 256")


def test_memory_that_runs_out_in_the_check_costs_no_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(*_: object) -> object:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 5.00 GiB.")

    monkeypatch.setattr(check_module, "gradients", short)
    found = cell(attention="sdpa")
    assert (found.status, found.verdict) == ("ok", "no_reference")
    assert "5.00 GiB" in found.verdict_reason
    assert len(found.step_s) == 2
    assert found.attention


def test_memory_that_runs_out_under_the_profiler_is_a_note_and_the_check_still_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def short(*_: object) -> object:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 5.00 GiB.")

    monkeypatch.setattr(work, "observe", short)
    found = cell(attention="sdpa")
    assert (found.status, found.verdict, found.attention) == ("ok", "ok", None)
    assert "5.00 GiB" in found.notes[0]


def test_host_memory_that_runs_out_is_oom_with_the_bytes() -> None:
    found = cell(attention="eager", seq=3_000_000)
    assert found.status == "oom"
    assert "9000000000000 bytes" in found.reason
    assert found.tokens_per_step == 3_000_000


def test_what_was_measured_before_memory_ran_out_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = {"left": 3}
    step = training_module.Training.step

    def failing(self: training_module.Training) -> torch.Tensor:
        steps["left"] -= 1
        if steps["left"] < 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return step(self)

    monkeypatch.setattr(training_module.Training, "step", failing)
    found = cell(attention="sdpa", steps=5)
    assert found.status == "oom"
    assert found.reason == "CUDA out of memory. Tried to allocate 2.00 GiB."
    assert found.first_step_s
    assert len(found.loss) == 3
    assert len(found.step_s) == 1
    assert found.memory.host_peak_bytes


def test_other_errors_are_not_called_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: object) -> torch.Tensor:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(training_module.Training, "step", failing)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        cell(attention="sdpa")


@pytest.mark.parametrize(
    ("axes", "device", "words"),
    [
        ({"step": "full"}, "cpu", "a full step has an optimizer"),
        ({"optimizer": "adamw"}, "cpu", "a full step has an optimizer"),
        (
            {"step": "full", "optimizer": "adamw", "dtype": "fp16"},
            "cuda",
            "GradScaler refuses fp16 parameters",
        ),
        ({"precision": "amp"}, "cpu", "autocast to float32"),
        ({"mode": "max-autotune"}, "cuda", "without anything to compile"),
        ({"compile": "layers", "mode": "reduce-overhead"}, "cpu", "cudagraphs"),
        ({"attention": "efficient"}, "cpu", "for CUDA"),
        ({"attention": "xformers"}, "cpu", "for CUDA"),
        ({"attention": "cudnn"}, "cpu", "for CUDA"),
        ({"attention": "flash"}, "cuda", "takes fp16 and bf16"),
        ({"attention": "flash"}, "cpu", ""),
        ({"compile": "model", "mode": "max-autotune-no-cudagraphs"}, "cpu", ""),
        ({"precision": "amp", "dtype": "fp16", "step": "full", "optimizer": "adamw"}, "cuda", ""),
    ],
)
def test_axes_that_make_no_sense_together_are_skipped_with_a_reason(
    axes: dict[str, object], device: str, words: str
) -> None:
    chosen = msgspec.convert({"model": "tiny-qwen2-4h", "seq": 8, **axes}, TrainStepAxes)
    reason = PROBE.skip(chosen, device)  # type: ignore[arg-type]
    assert words in reason
    assert bool(reason) == bool(words)


def test_estimates_grow_with_what_costs() -> None:
    def estimate(**axes: object) -> float:
        chosen = msgspec.convert(
            {"model": "qwen2.5-1.5b", "dtype": "fp16", "seq": 1024, **axes}, TrainStepAxes
        )
        return PROBE.estimate_s(chosen, "cuda", Measure())

    assert (
        estimate()
        < estimate(seq=8192)
        < estimate(seq=8192, compile="layers")
        < estimate(seq=8192, compile="model")
    )


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("compile", ["none", "mlp", "layers", "model"])
def test_every_estimate_is_positive(device: str, compile: str) -> None:
    for model in PRESETS:
        chosen = TrainStepAxes(model=model, seq=2, compile=compile)  # type: ignore[arg-type]
        assert PROBE.estimate_s(chosen, device, Measure(steps=1, warmup_steps=0, check=False)) > 0  # type: ignore[arg-type]


def test_a_checkpoint_folder_is_a_cell_whose_cost_is_not_known_beforehand(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    training_module.build("tiny-llama-4h", device="cpu", dtype=torch.float32).save_pretrained(folder)
    found = cell(model=str(folder), attention="flash")
    assert (found.status, found.verdict, found.flops_per_step) == ("ok", "ok", None)
    chosen = TrainStepAxes(model=str(folder), seq=32)
    assert PROBE.estimate_s(chosen, "cpu", Measure()) > 0


def test_only_a_compiled_cell_on_a_cpu_needs_the_compiler_prepared() -> None:
    def needs(device: str, compile: str) -> bool:
        chosen = TrainStepAxes(model="tiny-qwen2-4h", seq=8, compile=compile)  # type: ignore[arg-type]
        return PROBE.needs_prepare(chosen, device)  # type: ignore[arg-type]

    assert needs("cpu", "layers")
    assert not needs("cpu", "none")
    assert not needs("cuda", "layers")


@pytest.mark.parametrize("tiling", ["loss", "loss-mlp", "all"])
def test_tiles_and_offload_are_measured_and_checked(tiling: str) -> None:
    found = cell(tiling=tiling, checkpointing=True, offload=True, dtype="bf16")
    assert found.status == "ok", found.reason
    assert found.verdict == "ok", found.verdict_reason
    layers, steps = 2, 4
    assert found.facts["offloaded"] == layers * steps
    assert found.facts["kept_on_device"] == 0


def test_tiling_takes_memory_from_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the axis would be a label: the tiled loss is what runs."""
    seen: list[int] = []
    real = torch.ops.cp_volta.tiled_cross_entropy
    monkeypatch.setattr(
        "cp_volta.tiled_loss.torch.ops.cp_volta.tiled_cross_entropy",
        lambda *a: seen.append(1) or real(*a),
        raising=False,
    )
    cell(tiling="loss", check=False)
    assert seen
    seen.clear()
    cell(check=False)
    assert not seen


def test_combinations_without_a_meaning_are_skips_with_a_reason() -> None:
    def skip(device: str = "cuda", **axes: object) -> str:
        chosen = msgspec.convert({"model": "tiny-qwen2-4h", "seq": 32, **axes}, TrainStepAxes)
        return PROBE.skip(chosen, device)  # type: ignore[arg-type]

    assert "no checkpoints to offload" in skip(offload=True)
    assert "compile the layers" in skip(offload=True, checkpointing=True, compile="model")
    assert "for CUDA" in skip("cpu", budget_gib=16.0)
    assert not skip(offload=True, checkpointing=True, compile="layers", budget_gib=16.0, tiling="all")


@pytest.mark.parametrize("axes", [{}, {"lora": 4}], ids=["all parameters", "adapters"])
def test_a_planned_step_has_its_prediction_beside_it(axes: dict[str, object]) -> None:
    found = cell(
        tiling="plan", precision="amp", dtype="bf16", step="full", optimizer="adamw_host", steps=4, **axes
    )
    assert found.status == "ok", found.reason
    assert found.verdict == ("no_reference" if axes else "ok"), found.verdict_reason
    assert found.facts["predicted_peak_bytes"]
    assert "checkpointed" in str(found.facts["plan"])
    assert found.loss[-1] < found.loss[0]  # type: ignore[operator]
