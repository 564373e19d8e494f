"""Parity catches what comparators are known to let pass, and passes what is right."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from harness.rows import Parity
from probes.float64 import float64_everywhere
from probes.models.build import build, twin
from probes.parity import Losses, compare, tensors
from probes.text import tokens

UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
LOSSES = Losses(candidate=2.0, eager=2.0, reference=2.0)


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
        losses=losses or LOSSES,
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
    "only the reference is not finite": ([1.0, 2.0], [1.0, 2.0], [1.0, torch.nan]),
}


@pytest.mark.parametrize("values", NONFINITE.values(), ids=NONFINITE)
def test_what_is_not_finite_never_passes(values: tuple[list[float], ...]) -> None:
    candidate, eager = (torch.tensor(v, dtype=torch.float16) for v in values[:2])
    found = verdict(candidate, eager, torch.tensor(values[2], dtype=torch.float64))
    assert found.verdict == "nonfinite", found.reason


def test_eager_that_is_not_finite_is_no_bar_and_the_verdict_says_so() -> None:
    candidate, eager, exact = three()
    found = verdict(candidate, change(lambda x: x[3].fill_(torch.nan))(eager), exact)
    assert found.verdict == "caveat"
    assert found.reason.endswith("w: eager is not finite")
    assert verdict(candidate * 1.1, torch.full_like(eager, torch.inf), exact).verdict == "mismatch"


@pytest.mark.parametrize("loss", [2.01, 1.99, float("nan"), float("inf")])
def test_a_wrong_loss_is_no_pass(loss: float) -> None:
    found = verdict(*three(), Losses(candidate=loss, eager=2.0, reference=2.0))
    assert found.verdict in ("mismatch", "nonfinite")
    assert found.reason.startswith("loss")


def test_the_loss_of_float32_may_be_some_roundings_off_and_not_a_millionth() -> None:
    sides = three(dtype=torch.float32)
    for off, wanted in ((4 * 2**-24, "ok"), (1e-6, "mismatch")):
        found = verdict(*sides, Losses(candidate=2.0 * (1 + off), eager=2.0, reference=2.0))
        assert found.verdict == wanted, found.reason


def test_one_operator_has_no_loss_to_judge() -> None:
    candidate, eager, exact = three()
    found = compare(
        {"out": candidate}, {"out": eager}, {"out": exact}, dtype=torch.bfloat16, reference_name="float64"
    )
    assert found.verdict == "ok"
    assert (found.loss_candidate, found.loss_eager, found.loss_reference) == (None, None, None)
    assert "loss" not in found.reason


@pytest.mark.parametrize("dtype", UNIT)
def test_without_eager_the_bar_is_fixed_by_the_dtype(dtype: torch.dtype) -> None:
    exact = three()[2]
    for off, wanted in ((1.0, "ok"), (80.0, "mismatch")):
        candidate = (exact * (1 + off * UNIT[dtype])).to(dtype)
        found = compare({"w": candidate}, None, {"w": exact}, dtype=dtype, reference_name="float64")
        assert found.verdict == wanted, found.reason
        assert "no eager" in found.reason


def test_a_tensor_missing_on_either_side_is_a_mismatch() -> None:
    candidate, eager, exact = three()
    losses = LOSSES
    for sides in (
        ({}, {"w": eager}, {"w": exact}),
        ({"w": candidate, "x": candidate}, {"w": eager}, {"w": exact}),
    ):
        found = compare(*sides, dtype=torch.bfloat16, reference_name="float64", losses=losses)
        assert found.verdict == "mismatch"
        assert "has no such tensor" in found.reason


def test_a_name_that_eager_or_the_reference_lacks_is_a_mismatch() -> None:
    candidate, eager, exact = three()
    full = ({"w": candidate}, {"w": eager}, {"w": exact})
    for lacking in range(3):
        sides = [{} if i == lacking else side for i, side in enumerate(full)]
        found = compare(*sides, dtype=torch.bfloat16, reference_name="float64", losses=LOSSES)
        assert found.verdict == "mismatch"
    assert compare({}, {}, {}, dtype=torch.bfloat16, reference_name="").verdict == "mismatch"


def test_a_gradient_that_is_exactly_zero_is_met_by_zeros_alone() -> None:
    zero = torch.zeros(8)
    assert verdict(zero, zero, zero.double()).verdict == "ok"
    for eager in (zero, zero + 1e-20):
        found = verdict(zero + 1e-20, eager, zero.double())
        assert found.verdict == "mismatch"
        assert "the reference is zero everywhere" in found.reason
    tiny = torch.full((8,), 1e-200, dtype=torch.float64)  # its square is zero in float64
    assert verdict(tiny * 2, tiny, tiny).verdict == "mismatch"


def test_zeros_never_pass_for_a_gradient_that_eager_gets_roughly_right() -> None:
    _, _, exact = three(n=64)
    eager = (exact + 0.3 * exact.flip(0)).float()
    for wrong in (torch.zeros_like(eager), -eager, eager * 5):
        assert verdict(wrong, eager, exact).verdict == "mismatch"
    assert verdict(eager, eager, exact).verdict == "caveat"


def test_one_wrong_element_in_a_small_row_of_a_tensor_whose_rows_differ_by_far() -> None:
    candidate, eager, exact = three(n=262_144)
    scale = torch.ones(512, 1, dtype=torch.float64)
    scale[1:] = 1e-4
    sides = [(x.double().view(512, 512) * scale).to(x.dtype) for x in (candidate, eager, exact)]
    assert verdict(*sides).verdict == "ok"
    rms = sides[2].square().mean().sqrt()
    sides[0][300, 7] += float(rms)  # less than a hundredth of the largest element
    found = verdict(*sides)
    assert found.verdict == "mismatch"
    assert found.worst[0].outliers == 1


@pytest.mark.parametrize(("noise", "wanted"), [(1e-5, "caveat"), (1e-1, "mismatch")])
def test_a_gradient_that_is_zero_in_exact_arithmetic_may_be_rounding_noise_and_no_more(
    noise: float, wanted: str
) -> None:
    candidate, eager, exact = three(dtype=torch.float16)
    found = compare(
        {"w": candidate, "k": candidate * noise},
        {"w": eager, "k": eager * 0},
        {"w": exact, "k": exact * 1e-16},
        dtype=torch.float16,
        reference_name="float64",
    )
    assert found.verdict == wanted, found.reason
    assert "k" in found.reason


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
        losses=LOSSES,
    )
    assert found.verdict == "caveat"
    assert "noise is rounding noise even in eager" in found.reason


def test_without_a_reference_what_is_wrong_by_itself_is_still_told() -> None:
    candidate, eager, _ = three()
    nan = change(lambda x: x[3].fill_(torch.nan))(candidate)
    cases = (
        ({"w": nan}, {"w": eager}, 2.0, "nonfinite", "w: 1 elements are not finite; no memory"),
        ({"w": nan}, None, 2.0, "nonfinite", "w: 1 elements are not finite; no memory"),
        ({"w": candidate}, {"w": eager}, math.nan, "nonfinite", "loss: candidate nan; no memory"),
        (
            {"w": candidate[:1]},
            {"w": eager},
            2.0,
            "mismatch",
            "w: shape (1,), but eager's is (4096,); no memory",
        ),
        ({}, {"w": eager}, 2.0, "mismatch", "w: the candidate has no such tensor; no memory"),
        ({"w": candidate}, None, 2.0, "no_reference", "no memory"),
        ({"w": candidate}, {"w": torch.zeros_like(eager)}, 2.0, "no_reference", "no memory; largest"),
    )
    for mine, theirs, loss, wanted, reason in cases:
        found = compare(
            mine,
            theirs,
            None,
            dtype=torch.bfloat16,
            reference_name="no memory",
            losses=Losses(candidate=loss),
        )
        assert found.verdict == wanted, found.reason
        assert found.reason.startswith(reason)


def test_a_dtype_without_a_unit_roundoff_is_refused() -> None:
    with pytest.raises(ValueError, match="parity of torch.int8 is not defined"):
        compare({}, {}, {}, dtype=torch.int8, reference_name="")


@settings(max_examples=30, deadline=None)
@given(power=st.integers(-60, 60), wrong=st.booleans())
def test_the_verdict_does_not_depend_on_scale(power: int, wrong: bool) -> None:
    candidate, eager, exact = three(n=2048, dtype=torch.float32)
    candidate = candidate * 3 if wrong else candidate
    scaled = [x * 2.0**power for x in (candidate, eager, exact)]
    found = verdict(*scaled)
    assert found.verdict == ("mismatch" if wrong else "ok")
    assert found.worst == verdict(candidate, eager, exact).worst


@settings(max_examples=40, deadline=None)
@given(
    dtype=st.sampled_from(list(UNIT)),
    shape=st.lists(st.integers(1, 12), min_size=0, max_size=3),
    seed=st.integers(0, 1000),
)
def test_eager_itself_is_always_right(dtype: torch.dtype, shape: list[int], seed: int) -> None:
    exact = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    eager = exact.to(dtype)
    found = verdict(eager, eager, exact)
    assert found.verdict == "ok", found.reason


@settings(max_examples=20, deadline=None)
@given(order=st.permutations(["a", "b", "c", "d"]), wrong=st.sampled_from(["", "a", "c"]))
def test_the_order_of_names_means_nothing(order: list[str], wrong: str) -> None:
    candidate, eager, exact = three()
    sides = {name: (candidate * i, eager * i, exact * i) for i, name in enumerate("abcd", start=1)}
    if wrong:
        sides[wrong] = (-sides[wrong][0], *sides[wrong][1:])

    def judged(*names: list[str]) -> Parity:
        mappings = [{n: sides[n][i] for n in one} for i, one in enumerate(names)]
        return compare(*mappings, dtype=torch.bfloat16, reference_name="float64", losses=LOSSES)

    found, wanted = judged(order, order[::-1], order), judged(*[list("abcd")] * 3)
    assert found.verdict == wanted.verdict == ("mismatch" if wrong else "ok")
    assert not wrong or found.reason == wanted.reason


def test_large_tensors_are_taken_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    sides = three()
    wrong = change(lambda x: x[4090].add_(0.3))(sides[0])
    whole = verdict(*sides), verdict(wrong, *sides[1:])
    monkeypatch.setattr(tensors, "_CHUNK", 1000)
    for before, after in zip(whole, (verdict(*sides), verdict(wrong, *sides[1:])), strict=True):
        assert after.worst[0].error == pytest.approx(before.worst[0].error)
        assert (after.verdict, after.worst[0].outliers) == (before.verdict, before.worst[0].outliers)


def off_by(times: float, shape: tuple[int, ...], scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """A candidate whose error is `times` eager's, element by element in another order."""
    _, eager, exact = (x.view(shape) * scale for x in three(n=math.prod(shape), dtype=torch.float32))
    error = (eager.double() - exact).flip(0)
    return (exact + times * error).float(), eager, exact


def test_a_small_vector_may_be_eight_times_off_and_a_matrix_twice() -> None:
    for shape, verdicts in (((256,), ("ok", "mismatch")), ((16, 16), ("mismatch", "mismatch"))):
        found = [verdict(*off_by(times, shape)).verdict for times in (5, 12)]
        assert tuple(found) == verdicts
    assert verdict(*off_by(5, (4096,))).verdict == "mismatch"


@pytest.mark.parametrize(
    ("name", "times", "wanted"),
    [("k.bias", 15, "ok"), ("k.bias", 80, "mismatch"), ("k.gain", 15, "mismatch")],
)
def test_a_bias_whose_sum_cancels_may_be_as_far_off_as_its_weight(
    name: str, times: float, wanted: str
) -> None:
    weight, bias = off_by(1.0, (64, 64)), off_by(times, (64,), scale=0.1)
    sides = [{"k.weight": w, name: b} for w, b in zip(weight, bias, strict=True)]
    found = compare(*sides, dtype=torch.float32, reference_name="float64")
    assert found.verdict == wanted, found.reason
    zeros = {**sides[0], name: torch.zeros(64)}
    assert compare(zeros, *sides[1:], dtype=torch.float32, reference_name="float64").verdict == "mismatch"


Step = tuple[float, dict[str, Tensor]]


def steps(name: str, dtype: torch.dtype, seed: int, seq: int = 48) -> tuple[Step, Step, Step]:
    """Loss and gradients of a real tiny model: fused attention, eager attention, float64."""
    model = build(name, device="cpu", dtype=dtype, attention="sdpa", seed=seed)
    ids = tokens(2, seq, "cpu")

    def step(model: torch.nn.Module) -> Step:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return float(loss.detach()), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    exact = twin(model, dtype=torch.float64)
    sides = step(model), step(twin(model))
    with float64_everywhere():
        return *sides, step(exact)


def parity_of(candidate: Step, eager: Step, exact: Step, dtype: torch.dtype) -> Parity:
    return compare(
        candidate[1],
        eager[1],
        exact[1],
        dtype=dtype,
        reference_name="float64",
        losses=Losses(candidate=candidate[0], eager=eager[0], reference=exact[0]),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["tiny-qwen2-12h", "tiny-qwen3-4h"])
def test_fused_attention_in_a_real_model_passes_whatever_the_seed(name: str, dtype: torch.dtype) -> None:
    for seed in range(4):
        found = parity_of(*steps(name, dtype, seed), dtype)
        assert found.verdict == "ok", found.reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_attention_passes_at_a_length_where_the_key_biases_sums_cancel(dtype: torch.dtype) -> None:
    found = parity_of(*steps("tiny-qwen2-12h", dtype, 0, seq=1024), dtype)
    assert found.verdict == "ok", found.reason


def test_every_gradient_of_a_real_model_is_judged() -> None:
    (loss, right), eager, exact = steps("tiny-qwen2-4h", torch.bfloat16, 0)
    harms = (torch.zeros_like, torch.neg, lambda x: x * 5, lambda x: x * 1.2, lambda x: x.roll(1, 0))
    for name, harm in itertools.product(right, harms):
        found = parity_of((loss, {**right, name: harm(right[name])}), eager, exact, torch.bfloat16)
        assert found.verdict == "mismatch", (name, found.reason)
        assert found.reason.startswith(f"{name}: ")
        assert found.worst[0].name == name


def test_a_small_model_is_compared_within_ten_milliseconds_of_one_core() -> None:
    sides = steps("tiny-qwen2-4h", torch.float32, 0)
    threads, taken = torch.get_num_threads(), []
    torch.set_num_threads(1)
    try:
        for _ in range(20):
            began = time.thread_time()
            parity_of(*sides, torch.float32)
            taken.append(time.thread_time() - began)
    finally:
        torch.set_num_threads(threads)
    assert min(taken) < 0.010
