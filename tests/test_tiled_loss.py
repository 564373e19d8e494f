"""The tiled loss against torch's own cross-entropy: value, every gradient, small numbers, memory."""

from __future__ import annotations

import copy
import inspect
import math
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from cp_volta import overlay
from cp_volta.matmul import scaled
from cp_volta.tiled_head import tile_loss
from cp_volta.tiled_loss import default_tile, tiled_cross_entropy
from probes.models.build import build
from tests.allocations import allocations


def case(
    tokens: int = 37, hidden: int = 16, vocab: int = 50, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    h = torch.randn(tokens, hidden, dtype=dtype, requires_grad=True)
    w = torch.randn(vocab, hidden, dtype=dtype, requires_grad=True)
    b = torch.randn(vocab, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, vocab, (tokens,))
    labels[::5] = -100
    return h, w, b, labels


def stock(h: Tensor, w: Tensor, labels: Tensor, b: Tensor | None = None) -> Tensor:
    return F.cross_entropy(F.linear(h, w, b).to(torch.promote_types(h.dtype, torch.float32)), labels)


def close(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...], of: float) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert (a - b).abs().max() <= of * b.abs().max(), (a - b).abs().max()


def error(found: Tensor, true: Tensor) -> float:
    return float((found.double() - true).norm() / true.norm())


def representable(true: Tensor) -> float:
    """The error of float16 itself at this scale: of the true value, rounded."""
    return error(true.half(), true)


@given(tokens=st.integers(1, 40), tile=st.integers(1, 50), vocab=st.integers(2, 30), bias=st.booleans())
@settings(max_examples=25, deadline=None)
def test_loss_and_gradients_are_those_of_torch_for_any_tile(
    tokens: int, tile: int, vocab: int, bias: bool
) -> None:
    h, w, b, labels = case(tokens, 8, vocab)
    labels[0] = 0  # at least one token counts
    wrt = (h, w, b) if bias else (h, w)
    found = tiled_cross_entropy(h, w, labels, bias=b if bias else None, tile=tile)
    wanted = stock(h, w, labels, b if bias else None)
    assert math.isclose(found.item(), wanted.item(), rel_tol=1e-12)
    close(torch.autograd.grad(3 * found, wrt), torch.autograd.grad(3 * wanted, wrt), 1e-12)


def test_it_is_exact_in_float32_too_and_for_a_batch_that_is_not_contiguous() -> None:
    h, w, _, labels = case(36, dtype=torch.float32)
    turned = h.reshape(12, 3, 16).transpose(0, 1)
    other = labels.reshape(12, 3).t()
    found = tiled_cross_entropy(turned, w, other, tile=7)
    wanted = stock(h, w, labels)
    assert math.isclose(found.item(), wanted.item(), rel_tol=1e-6)
    close(torch.autograd.grad(found, (h, w)), torch.autograd.grad(wanted, (h, w)), 1e-6)


def test_sum_and_a_number_of_items_divide_as_asked() -> None:
    h, w, _, labels = case()
    counted = int((labels != -100).sum())
    mean = tiled_cross_entropy(h, w, labels, tile=8)
    total = tiled_cross_entropy(h, w, labels, tile=8, reduction="sum")
    assert math.isclose(total.item(), mean.item() * counted, rel_tol=1e-12)
    for items in (10, torch.tensor(10)):
        found = tiled_cross_entropy(h, w, labels, num_items=items, tile=8)
        assert math.isclose(found.item(), total.item() / 10, rel_tol=1e-12)


def test_where_no_token_counts_the_mean_is_nan_with_zero_gradients_as_torchs_own() -> None:
    h, w, _, labels = case()
    labels.fill_(-100)
    for loss in (tiled_cross_entropy(h, w, labels, tile=8), stock(h, w, labels)):
        assert loss.isnan()
        assert all(g.abs().max() == 0 for g in torch.autograd.grad(loss, (h, w)))
    assert tiled_cross_entropy(h, w, labels, tile=8, reduction="sum") == 0


def test_a_frozen_weight_or_frozen_hidden_states_get_no_gradient_and_no_buffer() -> None:
    h, w, _, labels = case(64, 16, 4096, torch.float32)
    with allocations() as seen:
        (found,) = torch.autograd.grad(tiled_cross_entropy(h, w.detach(), labels, tile=8), h)
    assert seen.largest_bytes <= 8 * 4096 * 4 < w.numel() * 4
    close((found,), torch.autograd.grad(stock(h, w, labels), (h,)), 1e-5)
    (found,) = torch.autograd.grad(tiled_cross_entropy(h.detach(), w, labels, tile=8), w)
    close((found,), torch.autograd.grad(stock(h, w, labels), (w,)), 1e-5)
    with torch.no_grad():
        assert not tiled_cross_entropy(h, w, labels).requires_grad


def test_a_second_derivative_is_refused() -> None:
    h, w, _, labels = case()
    (dh,) = torch.autograd.grad(tiled_cross_entropy(h, w, labels), h, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        torch.autograd.grad(dh.sum(), h)


@pytest.mark.parametrize("power", [0.0, 10.0, 16.0])
def test_float16_loses_nothing_at_half_a_million_tokens_under_a_grad_scaler(power: float) -> None:
    """A slice of rows of N = 524,288 tokens and V = 151,936 words, against float64 of the same float16 inputs.

    What is left is the rounding of one float16 product, as where the untiled path is given a loss of N = 1.
    """
    torch.manual_seed(0)
    h = torch.randn(24, 32).half().requires_grad_()
    w = (torch.randn(151_936, 32) * 0.02).half().requires_grad_()
    labels = torch.randint(0, 151_936, (24,))
    loss = tiled_cross_entropy(h, w, labels, num_items=524_288, tile=16) * 2.0**power
    dh, dw = torch.autograd.grad(loss, (h, w))
    h64, w64 = h.detach().double().requires_grad_(), w.detach().double().requires_grad_()
    wanted = F.cross_entropy(h64 @ w64.t(), labels, reduction="sum") / 524_288 * 2.0**power
    right = torch.autograd.grad(wanted, (h64, w64))
    assert all(error(f, t) <= 2 * representable(t) + 1e-3 for f, t in zip((dh, dw), right, strict=True))
    assert math.isclose(loss.item(), wanted.item(), rel_tol=1e-3)


def test_a_gradient_normalised_in_float16_would_be_nearly_all_zero() -> None:
    """The fault that the power of two and the float32 factor are there for, shown to be one."""
    p = torch.full((1000,), 1 / 151_936, dtype=torch.float64)
    assert ((p / 524_288).half() == 0).all()
    assert ((p * 4096).half() != 0).all()


def test_a_large_weight_takes_the_power_of_two_back_before_anything_overflows() -> None:
    torch.manual_seed(0)
    h = (torch.randn(8, 16) * 1e-3).half().requires_grad_()
    w = torch.randn(64, 16).mul_(1e4).half().requires_grad_()
    labels = torch.randint(0, 64, (8,))
    dh, dw = torch.autograd.grad(tiled_cross_entropy(h, w, labels), (h, w))
    assert dh.isfinite().all()
    assert dw.isfinite().all()
    h64, w64 = h.detach().double().requires_grad_(), w.detach().double().requires_grad_()
    right = torch.autograd.grad(stock(h64, w64, labels), (h64, w64))
    assert all(error(f, t) <= 2 * representable(t) + 2e-2 for f, t in zip((dh, dw), right, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_under_autocast_gradients_of_float32_inputs_are_float32_and_no_worse_than_stock(
    dtype: torch.dtype,
) -> None:
    h, w, _, labels = case(64, 32, 300, torch.float32)
    right = torch.autograd.grad(stock(h.double(), w.double(), labels), (h, w))
    with torch.autocast("cpu", dtype=dtype):
        found = torch.autograd.grad(tiled_cross_entropy(h, w, labels, tile=10), (h, w))
        plain = torch.autograd.grad(stock(h, w, labels), (h, w))
    for mine, theirs, true in zip(found, plain, right, strict=True):
        assert mine.dtype == torch.float32
        assert (mine - true).norm() <= 1.1 * (theirs - true).norm()


def test_the_factor_is_applied_before_the_result_is_narrowed() -> None:
    x = torch.full((5, 3), 1024.0, dtype=torch.float16)
    factor = torch.tensor(2.0**-30)  # as a float16 it is zero
    assert (scaled(x, factor, torch.float32) == 2.0**-20).all()
    assert (scaled(x, factor, torch.float16) == torch.tensor(2.0**-20).half()).all()
    assert (scaled(torch.full((2, 2), 1e6), torch.tensor(1e-3), torch.float16) == 1000).all()


def test_the_ops_obey_the_rules_of_custom_ops() -> None:
    h, w, b, labels = case(dtype=torch.float32)
    rest = (labels, torch.tensor(30.0), 8, -100, torch.float32, torch.float32, True, True)
    opcheck(torch.ops.cp_volta.tiled_cross_entropy.default, (h, w, b, *rest))
    opcheck(torch.ops.cp_volta.scaled.default, (h.detach(), torch.tensor(2.0), torch.float16))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tile": 0}, "at least 1"),
        ({"reduction": "none"}, "there are 'mean' and 'sum'"),
        ({"reduction": "sum", "num_items": 3}, "divide yourself"),
        ({"grad_dtype": torch.float16}, "is summed in torch.float64"),
        ({"bias": torch.zeros(3)}, "bias (3,) for 50 words"),
    ],
)
def test_what_makes_no_sense_is_refused(change: dict[str, object], message: str) -> None:
    h, w, _, labels = case()
    with pytest.raises(ValueError, match=re.escape(message)):
        tiled_cross_entropy(h, w, labels, **change)  # type: ignore[arg-type]


def test_dtypes_and_shapes_that_do_not_fit_are_refused() -> None:
    h, w, _, labels = case()
    for bad in (lambda: (h.float(), w, labels), lambda: (h, w[:, :3], labels), lambda: (h, w, labels[1:])):
        with pytest.raises(ValueError, match="autocast|does not fit|one label a token"):
            tiled_cross_entropy(*bad())


def test_a_label_outside_the_vocabulary_is_an_error_as_in_torch() -> None:
    h, w, _, labels = case()
    labels[1] = -1
    with pytest.raises((RuntimeError, IndexError)):
        tiled_cross_entropy(h, w, labels)


def test_the_default_tile_takes_about_a_gibibyte() -> None:
    assert default_tile(151_936, 2) == 1152
    assert default_tile(151_936, 2, in_place=True) == 3456
    assert default_tile(512, 4) * 512 * 4 <= 1 << 30
    assert default_tile(1 << 40, 2) == 16


# In transformers' own models --------------------------------------------------------------------------------------

MODELS = ("tiny-qwen2-4h", "tiny-qwen2-6h", "tiny-qwen3-4h", "tiny-llama-6h")  # tied and untied


def step(model: PreTrainedModel, **more: object) -> tuple[float, dict[str, Tensor]]:
    torch.manual_seed(1)
    ids = torch.randint(0, 512, (2, 19))
    labels = ids.clone()
    labels[:, :4] = -100
    model.zero_grad()
    loss = model(input_ids=ids, labels=labels, use_cache=False, **more).loss
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def same(found: tuple[float, dict[str, Tensor]], wanted: tuple[float, dict[str, Tensor]]) -> None:
    assert math.isclose(found[0], wanted[0], rel_tol=1e-6)
    assert found[1].keys() == wanted[1].keys()
    for name, grad in wanted[1].items():
        assert (found[1][name] - grad).abs().max() <= 4e-6 * grad.abs().max() + 1e-9, name


@pytest.mark.parametrize("name", MODELS)
def test_a_models_loss_and_every_gradient_stay_the_same(name: str) -> None:
    model = build(name, device="cpu", dtype=torch.float32)
    wanted = step(model)
    tile_loss(model, 8)
    same(step(model), wanted)


@pytest.mark.parametrize(
    "around",
    [
        lambda model: model.activation_checkpointing_enable({"use_reentrant": False}),
        lambda model: model.compile(backend="aot_eager", fullgraph=True),
    ],
    ids=["checkpointed", "compiled whole, one graph"],
)
def test_it_stays_right_with_what_surrounds_it(around: Callable[[PreTrainedModel], None]) -> None:
    model = build("tiny-qwen3-4h", device="cpu", dtype=torch.float32)
    wanted = step(model)
    tile_loss(model, 8)
    around(model)
    same(step(model), wanted)


def test_transformers_words_for_the_loss_are_understood() -> None:
    model = build("tiny-qwen2-4h", device="cpu", dtype=torch.float32)
    ids = torch.randint(0, 512, (1, 12))
    words = ({"num_items_in_batch": torch.tensor(7)}, {"shift_labels": ids.flip(1)}, {"ignore_index": 3})
    wanted = [model(input_ids=ids, labels=ids, **w).loss.item() for w in words]
    tile_loss(model, 8)
    found = [model(input_ids=ids, labels=ids, **w).loss.item() for w in words]
    assert all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(found, wanted, strict=True))
    assert model(input_ids=ids, labels=ids, return_dict=False)[0].dim() == 0
    assert model(input_ids=ids).logits.shape == (1, 12, 512)
    with pytest.raises(ValueError, match="logits_to_keep"):
        model(input_ids=ids, labels=ids, logits_to_keep=1)


def test_micro_batches_divided_by_all_their_tokens_add_up_to_one_batch() -> None:
    model = build("tiny-qwen2-4h", device="cpu", dtype=torch.float32)
    ids = torch.randint(0, 512, (4, 11))
    model(input_ids=ids, labels=ids).loss.backward()
    wanted = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    tile_loss(model, 8)
    for half in ids.chunk(2):
        model(input_ids=half, labels=half, num_items_in_batch=40).loss.backward()
    for name, parameter in model.named_parameters():
        close((parameter.grad,), (wanted[name],), 2e-6)  # type: ignore[arg-type]


def test_a_copy_of_a_tiled_model_is_tiled_by_itself() -> None:
    model = build("tiny-qwen2-4h", device="cpu", dtype=torch.float32)
    tile_loss(model, 8)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight.zero_()
    assert math.isclose(step(other)[0], math.log(512), rel_tol=1e-5)
    assert not math.isclose(step(model)[0], math.log(512), rel_tol=1e-5)


def test_its_forward_names_the_same_arguments() -> None:
    """transformers' Trainer drops the columns of a data set that a model's forward does not name."""
    model = build("tiny-qwen2-4h", device="cpu", dtype=torch.float32)
    before = inspect.signature(model.forward)
    tile_loss(model, 8)
    assert inspect.signature(model.forward) == before


def test_removed_it_leaves_no_trace() -> None:
    model = build("tiny-qwen2-4h", device="cpu", dtype=torch.float32)
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    tile_loss(model, 8)
    with pytest.raises(ValueError, match="untile the model first"):
        tile_loss(model, 8)
    assert overlay.remove(model)
    assert overlay.remove(model.lm_head)
    assert not overlay.remove(model)
    assert {name: dict(module.__dict__) for name, module in model.named_modules()} == before


def test_a_head_or_a_loss_of_another_kind_is_refused() -> None:
    model = build("tiny-qwen2-6h", device="cpu", dtype=torch.float32)
    model.loss_function = lambda **_: None
    with pytest.raises(ValueError, match="its loss is <lambda>"):
        tile_loss(model, 8)
    model = build("tiny-qwen2-6h", device="cpu", dtype=torch.float32)
    model.lm_head = nn.Sequential(model.lm_head)
    with pytest.raises(ValueError, match="its head is Sequential"):
        tile_loss(model, 8)


def test_the_logits_of_all_tokens_never_exist() -> None:
    model = build("tiny-qwen2-4h", device="cpu", dtype=torch.float32)
    ids = torch.randint(0, 512, (1, 600))
    logits = 600 * 512 * 4
    with allocations() as stock_seen:
        model(input_ids=ids, labels=ids).loss.backward()
    model.zero_grad()
    tile_loss(model, 32)
    with allocations() as seen:
        model(input_ids=ids, labels=ids).loss.backward()
    assert stock_seen.largest_bytes >= logits
    assert seen.largest_bytes < logits // 2
    assert seen.peak_bytes < stock_seen.peak_bytes - logits


def test_inside_a_checkpoint_it_is_taken_again_and_stays_right() -> None:
    h, w, _, labels = case()
    loss = checkpoint(lambda a, b: tiled_cross_entropy(a, b, labels, tile=8), h, w, use_reentrant=False)
    close(torch.autograd.grad(loss, (h, w)), torch.autograd.grad(stock(h, w, labels), (h, w)), 1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("items", [None, 3000])
def test_half_gradients_are_rounded_no_more_often_than_the_untiled_paths(
    dtype: torch.dtype, items: int | None
) -> None:
    """1/N is no power of two here: applied after the products it would round dhidden once more, 1.4 times the error."""
    torch.manual_seed(0)
    h = torch.randn(1001, 64).to(dtype).requires_grad_()
    w = (torch.randn(300, 64) * 0.3).to(dtype).requires_grad_()
    labels = torch.randint(0, 300, (1001,))
    h64, w64 = h.detach().double().requires_grad_(), w.detach().double().requires_grad_()
    part = 1001 / (items or 1001)
    right = torch.autograd.grad(stock(h64, w64, labels) * part, (h64, w64))
    theirs = torch.autograd.grad(stock(h, w, labels) * part * 1024, (h, w))
    mine = torch.autograd.grad(tiled_cross_entropy(h, w, labels, tile=100, num_items=items) * 1024, (h, w))
    for ours, other, true in zip(mine, theirs, right, strict=True):
        assert error(ours.double() / 1024, true) <= 1.05 * error(other.double() / 1024, true)
