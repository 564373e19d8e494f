"""Parity catches what comparators are known to let pass, and passes what is right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from harness.rows import Parity
from probes.parity import Losses, compare


def three(
    scale: float = 1.0, n: int = 4096, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor, Tensor]:
    """Candidate, eager and reference of one tensor: both roundings of the same exact values."""
    torch.manual_seed(0)
    exact = torch.randn(n, dtype=torch.float64) * scale
    noise = [torch.randn(n, dtype=torch.float64) * scale * 0.002 for _ in range(2)]
    return (exact + noise[0]).to(dtype), (exact + noise[1]).to(dtype), exact


def verdict(candidate: Tensor, eager: Tensor, reference: Tensor, losses: Losses | None = None) -> Parity:
    return compare(
        {"w": candidate},
        {"w": eager},
        {"w": reference},
        dtype=eager.dtype,
        reference_name="float64",
        losses=losses or Losses(candidate=2.0, eager=2.0, reference=2.0),
    )


def change(f: Callable[[Tensor], object]) -> Callable[[Tensor], Tensor]:
    def changed(x: Tensor) -> Tensor:
        y = x.clone()
        f(y)
        return y

    return changed


WRONG: dict[str, tuple[Callable[[Tensor], Tensor], float, int]] = {
    "zeros in place of small gradients": (torch.zeros_like, 1e-3, 4096),
    "the sign turned": (torch.neg, 1e-3, 4096),
    "five times too large": (lambda x: x * 5, 1.0, 4096),
    "one element off by 1 in 262,144": (change(lambda x: x[7].add_(1.0)), 1.0, 262_144),
    "one element off by 0.3 in 4,096": (change(lambda x: x[7].add_(0.3)), 1.0, 4096),
    "shape (1,) in place of (4,)": (lambda x: x[:1], 1.0, 4),
    "another dtype": (lambda x: x.float(), 1.0, 4096),
}


@pytest.mark.parametrize(("change", "scale", "n"), WRONG.values(), ids=WRONG)
def test_wrong_gradients_are_a_mismatch(change: Callable[[Tensor], Tensor], scale: float, n: int) -> None:
    candidate, eager, exact = three(scale, n)
    if n == 262_144 or n == 4096:
        assert verdict(candidate, eager, exact).verdict == "ok"
    found = verdict(change(candidate), eager, exact)
    assert found.verdict == "mismatch", found.reason
    assert found.reason.startswith("w: ")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_two_and_a_half_times_eagers_error_is_a_mismatch(dtype: torch.dtype) -> None:
    _, eager, exact = three(dtype=dtype)
    worse = (exact + (eager.double() - exact).flip(0) * 2.5).to(dtype)
    found = verdict(worse, eager, exact)
    assert found.verdict == "mismatch"
    assert "bar" in found.reason


NONFINITE = {
    "inf where finite": ([1.0, torch.inf], [1.0, 2.0], [1.0, 2.0]),
    "finite where the reference is inf": ([1.0, 0.0], [1.0, torch.inf], [1.0, torch.inf]),
    "NaN at another index": ([torch.nan, 1.0], [1.0, torch.nan], [1.0, torch.nan]),
    "all NaN alike": ([torch.nan] * 2, [torch.nan] * 2, [torch.nan] * 2),
    "the same infinity": ([torch.inf, 1.0], [torch.inf, 1.0], [torch.inf, 1.0]),
    "inf of the other sign": ([torch.inf, 1.0], [-torch.inf, 1.0], [-torch.inf, 1.0]),
    "eager alone is not finite": ([1.0, 2.0], [1.0, torch.nan], [1.0, 2.0]),
}


@pytest.mark.parametrize("values", NONFINITE.values(), ids=NONFINITE)
def test_what_is_not_finite_never_passes(values: tuple[list[float], ...]) -> None:
    candidate, eager = (torch.tensor(v, dtype=torch.float16) for v in values[:2])
    found = verdict(candidate, eager, torch.tensor(values[2], dtype=torch.float64))
    assert found.verdict == "nonfinite", found.reason


@pytest.mark.parametrize("loss", [2.01, 1.99, float("nan"), float("inf")])
def test_a_wrong_loss_is_no_pass(loss: float) -> None:
    found = verdict(*three(), Losses(candidate=loss, eager=2.0, reference=2.0))
    assert found.verdict in ("mismatch", "nonfinite")
    assert found.reason.startswith("loss")


def test_a_tensor_missing_on_either_side_is_a_mismatch() -> None:
    candidate, eager, exact = three()
    losses = Losses(candidate=2.0, eager=2.0, reference=2.0)
    for sides in (
        ({}, {"w": eager}, {"w": exact}),
        ({"w": candidate, "x": candidate}, {"w": eager}, {"w": exact}),
    ):
        found = compare(*sides, dtype=torch.bfloat16, reference_name="float64", losses=losses)
        assert found.verdict == "mismatch"
        assert "has no such tensor" in found.reason


def test_a_gradient_that_is_exactly_zero_is_met_by_zeros_alone() -> None:
    zero = torch.zeros(8)
    assert verdict(zero, zero, zero.double()).verdict == "ok"
    assert verdict(zero + 1e-20, zero, zero.double()).verdict == "mismatch"


def test_without_a_reference_the_verdict_says_so() -> None:
    candidate, eager, _ = three()
    found = compare(
        {"w": candidate},
        {"w": eager},
        None,
        dtype=torch.bfloat16,
        reference_name="it did not fit",
        losses=Losses(candidate=2.0, eager=2.0),
    )
    assert found.verdict == "no_reference"
    assert found.reason.startswith("it did not fit; largest difference from eager, which proves nothing")


def test_a_reference_no_more_precise_than_the_candidate_is_a_caveat() -> None:
    candidate, eager, exact = three(dtype=torch.float32)
    assert verdict(candidate, eager, exact.float()).verdict == "caveat"


def test_rounding_noise_in_eager_itself_is_a_caveat_and_not_a_pass() -> None:
    _, eager, exact = three()
    found = compare(
        {"w": eager, "noise": eager},
        {"w": eager, "noise": eager},
        {"w": exact, "noise": exact * 0.5},
        dtype=torch.bfloat16,
        reference_name="float64",
        losses=Losses(candidate=2.0, eager=2.0, reference=2.0),
    )
    assert found.verdict == "caveat"
    assert "noise is rounding noise even in eager" in found.reason


@settings(max_examples=30, deadline=None)
@given(power=st.integers(-20, 20), wrong=st.booleans())
def test_the_verdict_does_not_depend_on_scale(power: int, wrong: bool) -> None:
    candidate, eager, exact = three(n=2048, dtype=torch.float32)
    candidate = candidate * 3 if wrong else candidate
    scaled = [x * 2.0**power for x in (candidate, eager, exact)]
    assert verdict(*scaled).verdict == ("mismatch" if wrong else "ok")


def test_large_tensors_are_taken_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    import probes.parity as parity

    whole = verdict(*three())
    monkeypatch.setattr(parity, "_CHUNK", 1000)
    chunked = verdict(*three())
    assert chunked.worst[0].error == pytest.approx(whole.worst[0].error)
    assert chunked.verdict == whole.verdict


def test_a_small_vector_may_be_eight_times_off_and_a_matrix_twice() -> None:
    for n, verdicts in ((256, ("ok", "mismatch")), (4096, ("mismatch", "mismatch"))):
        _, eager, exact = three(n=n, dtype=torch.float32)
        error = (eager.double() - exact).flip(0)
        found = [verdict((exact + times * error).float(), eager, exact).verdict for times in (5, 12)]
        assert tuple(found) == verdicts
