"""backward-memory: what autograd keeps is counted once, and a step that hoards is told from one that does not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from harness.rows import Parity, Result
from probes import backward_memory
from probes.backward_memory import BackwardMemoryAxes, work
from probes.backward_memory.saved import Saved, peak_above, saving
from probes.train_step import training
from tests.tasks import task


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).exp()
        return x


def test_each_storage_counts_once_and_neither_weights_nor_inputs_do() -> None:
    model, x = _Two(), torch.randn(4, 8)
    with saving(model, x) as saved:
        model(x).sum()
    # both exp() keep their result; the second layer keeps the first one's again, the first the input
    assert saved.bytes == 2 * 4 * 8 * 4
    assert set(saved.by_module) == {"_Two"}
    assert saved.shapes["_Two"]["[4, 8] float32"] == 2


def test_modules_of_one_stack_are_one_line() -> None:
    class Keeps(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.exp()

    model = nn.Sequential(Keeps(), Keeps(), nn.Linear(8, 8))
    x = torch.randn(4, 8, requires_grad=True)
    with saving(model, x) as saved:
        model(x)
    assert saved.lines(1) == ["Sequential.*: 0.00 MiB (2 of [4, 8] float32)"]


def test_the_rise_sees_what_is_made_and_freed_inside() -> None:
    torch.ones(8).sum()
    with peak_above("cpu") as rise:
        big = torch.empty(1 << 20)
        del big
        kept = torch.empty(1 << 18)
    assert 4 << 20 <= rise[0] < 5 << 20
    assert kept.numel()


def cell(**axes: object) -> Result:
    chosen = {"model": "tiny-qwen2-4h", "seq": 64, "compile": "layers", **axes}
    return work.run(msgspec.convert(chosen, BackwardMemoryAxes), task())


def test_equal_steps_are_ok_and_a_step_that_hoards_is_a_caveat(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(model: Any, mode: str) -> None:
        pass

    def hoards(model: Any, mode: str) -> None:
        for layer in model.model.layers:
            layer.register_forward_hook(lambda m, a, out: _costly(out))

    monkeypatch.setitem(training._COMPILERS, "layers", nothing)
    found = cell()
    assert found.verdict == "ok", found.verdict_reason
    assert found.facts["compiled_saved_bytes"] == found.facts["eager_saved_bytes"]
    assert found.facts["compiled_over_eager"] == pytest.approx(1.0, abs=0.02)
    monkeypatch.setitem(training._COMPILERS, "layers", hoards)
    found = cell()
    assert found.verdict == "caveat"
    assert "compiled takes more" in found.verdict_reason
    assert "[64, 8192] float32" in found.verdict_reason


def _costly(out: Tensor) -> Tensor:
    """The same values and gradients, with 2 MiB kept for the backward."""
    many = torch.zeros(64, 8192)
    return out + (out.sum() * 0 + many.requires_grad_()).exp().sum() * 0


def test_wrong_gradients_are_no_question_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(model: Any, mode: str) -> None:
        model.model.layers[1].mlp.down_proj.weight.register_hook(lambda grad: grad * 1.5)

    monkeypatch.setitem(training._COMPILERS, "layers", wrong)
    found = cell()
    assert found.verdict == "mismatch"
    assert "down_proj" in found.verdict_reason


@pytest.mark.parametrize("verdict", ["ok", "caveat", "mismatch", "nonfinite", "no_reference"])
def test_a_better_peak_hides_no_verdict(verdict: Any) -> None:
    class _Side:
        saved, peak_bytes = Saved(), 100

    parity = Parity(verdict=verdict, reason="because")
    assert work.judge(parity, _Side, _Side)[0] == verdict  # type: ignore[arg-type]


def test_what_cannot_be_is_a_skip() -> None:
    skip = backward_memory.PROBE.skip
    assert "cudagraphs" in skip(BackwardMemoryAxes(model="tiny-qwen2-4h", mode="reduce-overhead"), "cpu")
    assert "for CUDA" in skip(BackwardMemoryAxes(model="tiny-qwen2-4h", attention="efficient"), "cpu")
