"""Several steps, recorded and judged: buffers, input gradients, an eager that does not repeat itself."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from probes.parity.steps import Recorded, Schedule, differences, record, reference, same_bits, verdicts

STEPS = Schedule(steps=2)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.norm(self.linear(x))
        return y, (y * x).square().mean()


def sides(spoil: Callable[[Recorded], object] = lambda _: None) -> tuple[Recorded, Recorded, Recorded]:
    """Candidate, eager and float64 of a module that has buffers; each starts from the same ones."""
    torch.manual_seed(0)
    given = [(torch.randn(16, 8, requires_grad=True),) for _ in range(2)]
    module = Normed()
    candidate, eager = (record(m, m, given, STEPS) for m in (copy.deepcopy(module), copy.deepcopy(module)))
    spoil(candidate)
    return candidate, eager, reference(copy.deepcopy(module).double(), given, STEPS)


def judged(
    spoil: Callable[[Recorded], object] = lambda _: None, again: Recorded | None = None
) -> tuple[str, str]:
    candidate, eager, ruler = sides(spoil)
    found = verdicts(candidate, eager, again or eager, ruler, dtype=torch.float32, reference_name="float64")
    return found.whole.verdict, found.whole.reason


def test_everything_that_steps_leave_is_recorded() -> None:
    candidate, _, _ = sides()
    names = set(candidate.gradients)
    assert {"step 1: linear.weight", "step 2: norm.bias", "step 2: gradient of input 0"} <= names
    assert {"buffer norm.running_mean", "buffer norm.num_batches_tracked"} <= names
    assert list(candidate.losses) == ["step 1: loss", "step 2: loss"]
    assert judged()[0] in ("ok", "caveat")


@pytest.mark.parametrize(
    "name", ["buffer norm.running_var", "buffer norm.num_batches_tracked", "step 2: gradient of input 0"]
)
def test_a_buffer_or_an_input_gradient_that_is_off_is_named(name: str) -> None:
    verdict, reason = judged(lambda r: r.gradients[name].mul_(2))
    assert verdict == "mismatch"
    assert name in reason


def test_a_loss_of_the_second_step_is_named() -> None:
    verdict, reason = judged(lambda r: r.losses.update({"step 2: loss": r.losses["step 2: loss"] * 1.005}))
    assert verdict == "mismatch"
    assert "step 2: loss" in reason


def test_eager_that_does_not_repeat_itself_is_a_caveat_that_names_a_tensor() -> None:
    _, again, _ = sides(lambda _: None)
    again.outputs["step 2: output"] = again.outputs["step 2: output"] + 1e-7
    assert differences(sides()[1], again) == ["step 2: output"]
    verdict, reason = judged(again=again)
    assert verdict == "caveat"
    assert "eager twice differs in 1 tensors, step 2: output first" in reason


def test_without_a_reference_several_steps_are_no_pass() -> None:
    candidate, eager, _ = sides()
    found = verdicts(candidate, eager, eager, None, dtype=torch.float32, reference_name="no memory")
    assert (found.whole.verdict, "no memory" in found.whole.reason) == ("no_reference", True)


def test_batches_must_fit_the_schedule() -> None:
    module = Normed()
    with pytest.raises(ValueError, match="1 batches; the schedule takes 4"):
        record(module, module, [(torch.ones(2, 8),)], Schedule(steps=2, accumulate=2))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([float("nan")], [0.0]),
        ([float("inf")], [torch.finfo(torch.float32).max]),
        ([0.0], [-0.0]),
        ([1.0, 2.0], [1.0]),
    ],
)
def test_bits_are_compared_and_nothing_else(one: list[float], other: list[float]) -> None:
    """Compared after nan_to_num, a NaN was the same as a zero."""
    a, b = torch.tensor(one), torch.tensor(other)
    assert not same_bits(a, b)
    assert same_bits(a, a.clone())
    assert not same_bits(a, a.double())
    assert not same_bits(a, None)
