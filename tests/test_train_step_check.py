"""The numerical check: wrong gradients are caught, and a lack of memory is said and costs no timing."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from probes.train_step import TrainStepAxes, check, memory, reference
from probes.train_step.training import Training


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads that wait for each other on a busy machine make a small model 50 times slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def training(**axes: object) -> Training:
    return Training(
        TrainStepAxes(**{"model": "tiny-qwen2-6h", "seq": 32, "attention": "flash", **axes}), "cpu", 0
    )  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spoil", "verdict"),
    [
        (lambda g: torch.zeros_like(g), "mismatch"),
        (lambda g: -g, "mismatch"),
        (lambda g: g * 1.001, "mismatch"),
        (lambda g: g.index_fill(0, torch.tensor([0]), torch.nan), "nonfinite"),
    ],
)
@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_proj.bias", "model.embed_tokens.weight"])
def test_a_wrong_gradient_is_named(name: str, spoil, verdict: str) -> None:  # type: ignore[no-untyped-def]
    t = training()
    t.model.get_parameter(name).register_hook(spoil)
    found = check.check(t)
    assert found.verdict == verdict
    assert name in found.reason


def test_what_is_frozen_is_frozen_in_every_twin() -> None:
    t = training()
    t.model.get_parameter("model.norm.weight").requires_grad_(False)
    found = check.check(t)
    assert found.verdict == "ok"
    assert found.tensors == len(list(t.model.parameters())) - 1


def test_a_wrong_loss_is_caught() -> None:
    t = training()
    stock = t.model.forward
    t.model.forward = lambda **kw: _off(stock(**kw))  # type: ignore[method-assign]
    assert check.check(t).verdict == "mismatch"


def _off(out):  # type: ignore[no-untyped-def]
    out.loss = out.loss * 1.01
    return out


def test_checked_gradients_leave_the_model_as_it_was() -> None:
    t = training()
    before = {n: p.detach().clone() for n, p in t.model.named_parameters()}
    check.check(t)
    assert all(torch.equal(before[n], p) and p.grad is None for n, p in t.model.named_parameters())


def test_where_float64_does_not_fit_the_reference_is_float32_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    t = training(dtype="bf16")
    between = (reference._needs_bytes(t, 8) + reference._needs_bytes(t, 4)) / 2
    monkeypatch.setattr(reference, "free_bytes", lambda device: int(between / 0.8))
    found = check.check(t)
    assert found.reference.startswith("float32")
    assert found.verdict in ("ok", "caveat")


def test_where_no_reference_fits_the_verdict_is_no_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "free_bytes", lambda device: 1)
    found = check.check(training())
    assert found.verdict == "no_reference"
    assert "no memory for a reference" in found.reason


@pytest.mark.parametrize(
    ("place", "words"), [("gradients", "take the gradients once more"), ("eager", "no memory for eager")]
)
def test_memory_that_runs_out_in_the_check_is_no_reference(
    place: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(*_: object) -> object:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 5.00 GiB.")

    monkeypatch.setattr(check, place, short)
    found = check.check(training())
    assert found.verdict == "no_reference"
    assert words in found.reason
    assert "5.00 GiB" in found.reason


def test_a_reference_that_was_not_float64_throughout_gives_way_to_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def narrow(_: Training) -> reference.Side:
        raise reference.NarrowOperation("operations in less than float64: aten.mul (3 times)")

    monkeypatch.setattr(reference, "_float64", narrow)
    assert check.check(training(dtype="bf16")).reference.startswith("float32")


def test_a_failed_attempt_holds_no_tensor() -> None:
    held: list[weakref.ref[Tensor]] = []

    def fails() -> None:
        tensor = torch.zeros(8)
        held.append(weakref.ref(tensor))
        raise RuntimeError(
            "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
        )

    result, why = memory.attempt(fails)
    assert result is None
    assert "tried to allocate 9 bytes" in why
    assert held[0]() is None


@pytest.mark.parametrize("batch", [1, 3])
def test_the_tiled_loss_is_the_stock_loss(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_TILE", 7)
    t = training(batch=batch)
    with torch.no_grad():
        stock = t.loss(t.model)
        tiled = reference.tiled_loss(t.model, t.ids_BS)
    torch.testing.assert_close(tiled, stock, rtol=1e-6, atol=0)


def test_the_tiled_loss_has_the_stock_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_TILE", 7)
    t = training()
    reference.tiled_loss(t.model, t.ids_BS).backward()
    tiled = {n: p.grad.clone() for n, p in t.model.named_parameters()}  # type: ignore[union-attr]
    t.step()
    for name, parameter in t.model.named_parameters():
        torch.testing.assert_close(tiled[name], parameter.grad, rtol=1e-4, atol=1e-7)


def test_fp16_gradients_are_checked_under_a_scale() -> None:
    found = check.check(training(dtype="fp16"))
    assert "loss of all scaled by 1024" in found.reference
    assert found.verdict in ("ok", "caveat"), found.reason
