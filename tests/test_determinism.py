"""determinism: a bit that differs is found, named and measured; the same bits are ok."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.qwen2 import modeling_qwen2

from harness.cells import Measure
from harness.rows import CompileReport, Result
from probes import determinism
from probes.determinism import DeterminismAxes, work
from probes.determinism.work import judge, run, same_bits
from probes.train_step import training
from tests.dynamo_state import clean_dynamo  # noqa: F401
from tests.tasks import task
from tests.test_cli import harness

pytestmark = pytest.mark.usefixtures("clean_dynamo", "own_environment")


@pytest.fixture
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell's variables end with its process; here they must not reach the tests that follow."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")  # what is set later goes with it in the end


STOCK = modeling_qwen2.Qwen2MLP.forward
CALLS_OF_A_STEP = 2 * 2  # two layers, two trainings


def cell(*, steps: int = 2, device: str = "cpu", **axes: object) -> Result:
    chosen = msgspec.convert({"seq": 16, "batch": 1, **axes}, DeterminismAxes)
    return run(chosen, task(device, measure=Measure(steps=steps)))


@pytest.fixture
def mlp(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Tensor, int], Tensor]], None]:
    """Put a function of an MLP's output and of the number of the call behind each MLP."""

    def put(change: Callable[[Tensor, int], Tensor]) -> None:
        calls: Iterator[int] = itertools.count(1)

        def forward(self: nn.Module, x: Tensor) -> Tensor:
            return change(STOCK(self, x), next(calls))

        monkeypatch.setattr(modeling_qwen2.Qwen2MLP, "forward", forward)

    return put


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "axes",
    [
        {"attention": "eager"},
        {"attention": "flash"},
        {"dtype": "bf16"},
        {"dtype": "fp16", "precision": "amp"},
        {"model": "tiny-llama-6h"},
    ],
    ids=lambda axes: "-".join(axes.values()),
)
def test_stock_models_leave_the_same_bits(axes: dict[str, object], deterministic: bool) -> None:
    found = cell(**axes, deterministic=deterministic)
    assert found.verdict == "ok", found.verdict_reason
    assert found.facts["deterministic_algorithms"] is deterministic
    assert not torch.are_deterministic_algorithms_enabled()
    assert len(found.loss) == 2
    assert found.loss[0] != found.loss[1]  # weights did move


def test_a_compiled_model_leaves_the_same_bits_and_its_report_is_of_one_model() -> None:
    found = cell(compile="mlp")
    assert found.verdict == "ok", found.verdict_reason
    assert found.compile
    assert (found.compile.graphs, found.compile.recompiles) == (1, ())


def test_rounding_that_differs_is_a_caveat_with_the_first_tensor_and_its_size(mlp: Any) -> None:
    mlp(lambda out, call: out * (1 + 1e-6 * call))
    found = cell()
    assert found.verdict == "caveat", found.verdict_reason
    assert found.facts["first_differing_step"] == 1
    assert 0 < float(found.facts["difference_over_rms"] or 0) < 1e-4
    assert "of its RMS" in found.verdict_reason
    assert 0 < float(found.facts["worst_over_bar"] or 0) <= 1


def test_more_than_rounding_is_a_mismatch(mlp: Any) -> None:
    mlp(lambda out, call: out * (1 + 0.05 * call))
    assert cell().verdict == "mismatch"


def test_any_bit_is_a_mismatch_where_deterministic_algorithms_were_asked_for(mlp: Any) -> None:
    mlp(lambda out, call: out * (1 + 1e-6 * call))
    found = cell(deterministic=True)
    assert found.verdict == "mismatch"
    assert "though deterministic algorithms were on" in found.verdict_reason


def test_a_backward_that_differs_is_seen_in_the_gradients_behind_it(mlp: Any) -> None:
    class Unsteady(torch.autograd.Function):
        calls = 0

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            Unsteady.calls += 1
            return grad * (1 + 1e-6 * Unsteady.calls)

    mlp(lambda out, call: Unsteady.apply(out))  # type: ignore[no-untyped-call]
    found = cell(steps=1)
    assert found.verdict == "caveat", found.verdict_reason
    # the norm behind the last MLP is before it in backward, and the same
    assert (
        found.facts["first_differing_tensor"] == "gradient of model.layers.1.post_attention_layernorm.weight"
    )
    assert found.facts["last_loss_difference"] == 0.0


def test_a_difference_that_comes_late_has_its_step(mlp: Any) -> None:
    mlp(lambda out, call: out * (1 + 1e-6 * call) if call > CALLS_OF_A_STEP else out)
    assert cell(steps=3).facts["first_differing_step"] == 2
    assert cell(steps=3).verdict == "caveat"


def test_an_optimizer_that_differs_is_seen_in_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    stock, calls = torch.optim.AdamW.step, itertools.count(1)

    def step(self: torch.optim.AdamW, closure: None = None) -> None:
        stock(self, closure)
        with torch.no_grad():
            self.param_groups[0]["params"][0].mul_(1 + 1e-5 * next(calls))

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    found = cell(steps=1)
    assert found.verdict in ("caveat", "mismatch"), found.verdict_reason
    assert str(found.facts["first_differing_tensor"]).startswith("weight ")


def test_models_that_began_differently_are_told_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = itertools.count()

    def made(*arguments: Any) -> training.Training:
        one = training.Training(*arguments)
        with torch.no_grad():
            one.model.lm_head.weight.add_(next(calls))
        return one

    monkeypatch.setattr(work, "Training", made)
    found = cell()
    assert found.verdict == "mismatch"
    assert found.facts["first_differing_step"] == 0
    assert "before the first step: weight model.embed_tokens.weight" in found.verdict_reason


def test_random_numbers_are_the_same_for_both(mlp: Any) -> None:
    mlp(lambda out, call: F.dropout(out, 0.5))
    assert cell().verdict == "ok"


def test_a_loss_that_is_no_number_says_nothing(mlp: Any) -> None:
    mlp(lambda out, call: out * torch.nan)
    found = cell()
    assert found.verdict == "nonfinite"
    assert "step 1: losses nan and nan" in found.verdict_reason


def test_an_operation_without_a_deterministic_form_is_unsupported(mlp: Any) -> None:
    def put(out: Tensor, call: int) -> Tensor:
        torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))
        return out

    mlp(put)
    assert cell().verdict == "ok"
    found = cell(deterministic=True)
    assert found.status == "unsupported"
    assert "put_ does not have a deterministic implementation" in found.reason
    assert not torch.are_deterministic_algorithms_enabled()


def test_an_error_that_is_not_about_determinism_is_no_refusal(mlp: Any) -> None:
    def fail(out: Tensor, call: int) -> Tensor:
        raise RuntimeError("shapes differ")

    mlp(fail)
    with pytest.raises(RuntimeError, match="shapes differ"):
        cell(deterministic=True)


def test_another_attention_kernel_than_asked_for_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "implementation", lambda attention: "eager")
    found = cell(attention="flash")
    assert (found.status, found.reason) == ("unsupported", "asked for flash, math ran")


def test_what_ran_eagerly_after_all_is_a_caveat() -> None:
    report = CompileReport(asked="layers", fallbacks=("InductorError: x",))
    verdict, reason = judge(DeterminismAxes(), None, [(1.0, 1.0)], report, 5)
    assert verdict == "caveat"
    assert "ran eagerly: InductorError: x" in reason


def test_a_gradient_that_one_run_lacks_is_a_mismatch() -> None:
    left = {"loss": torch.ones(()), "gradient of w": torch.ones(2)}
    found = work.difference(1, left, {"loss": torch.ones(())}, torch.float32)
    assert found
    assert (found.name, found.error, found.times) == ("gradient of w", float("inf"), float("inf"))
    found = work.difference(1, {"loss": torch.ones(())}, left, torch.float32)
    assert found
    assert found.times == float("inf")


def test_a_gradient_that_cancels_is_held_to_the_largest_beside_it() -> None:
    def left(small: float, large: float) -> dict[str, Tensor]:
        return {"gradient of b": torch.full((4,), small), "gradient of w": torch.full((4,), large)}

    noise = work.difference(1, left(1e-9, 1.0), left(-3e-9, 1.0), torch.float32)
    garbage = work.difference(1, left(1e-3, 1.0), left(-3e-3, 1.0), torch.float32)
    gone = work.difference(1, left(1e-3, 1.0), left(1e-3, 0.0), torch.float32)
    assert noise
    assert garbage
    assert gone
    assert noise.times < 1 < garbage.times
    assert (gone.worst, gone.times > 1) == ("gradient of w", True)


def test_bits_are_bits() -> None:
    zero, nan = torch.zeros(2), torch.full((2,), torch.nan)
    assert same_bits(nan, nan.clone())
    assert same_bits(torch.tensor(1.0), torch.tensor(1.0))
    assert not same_bits(zero, -zero)
    assert not same_bits(zero, zero.half())
    assert not same_bits(zero, torch.zeros(3))
    assert same_bits(torch.ones(2, 3).T, torch.ones(3, 2))


def test_what_cannot_be_is_skipped_or_refused() -> None:
    assert "GradScaler refuses" in determinism.skip(DeterminismAxes(dtype="fp16"), "cpu")
    assert "is for CUDA" in determinism.skip(DeterminismAxes(attention="efficient"), "cpu")
    done = harness("determinism", "model=tiny-quen2-4h", module="harness.probe")
    assert (done.returncode, "Did you mean 'tiny-qwen2-4h'?" in done.stderr) == (2, True)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("attention", ["math", "efficient"])
def test_on_a_gpu_deterministic_algorithms_keep_their_promise(attention: str) -> None:
    found = cell(
        device="cuda", dtype="fp16", precision="amp", attention=attention, deterministic=True, seq=128
    )
    assert found.status in ("ok", "unsupported"), found.reason
    if found.status == "ok":
        assert found.verdict == "ok", found.verdict_reason
        assert found.facts["cublas_workspace"] == ":4096:8"
