"""Tiles, checkpoints and `prepare` over several ranks give what one device gives. Real processes over gloo."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import cp_volta
from cp_volta.planning import DoesNotFit
from probes.models.build import build
from probes.text import tokens
from tests.ranks import run_ranks
from tests.test_cp_attention import Mode
from tests.test_cp_training import (
    ULYSSES,
    ZIGZAG,
    Found,
    _batches,
    _full,
    _model,
    _near,
    _one_device,
    _wrapped,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
PARTS = {
    "loss": {"mlp": False, "norms": False, "projections": False},
    "mlp": {"loss": False, "norms": False, "projections": False},
    "norms": {"loss": False, "mlp": False, "projections": False},
    "projections": {"loss": False, "mlp": False, "norms": False},
    "all": {},
}


def _tiled(rank: int, mode: Mode, wrap: str, parts: dict[str, Any], micro: int) -> Found:
    """As test_cp_training's step, of a tiled and checkpointed model that takes its own loss from the labels."""
    cp = mode.group()
    sizes = dict.fromkeys(("loss", "mlp", "norms", "projections"), 5)  # divides no shard
    model = cp_volta.tile(_model(), **{**sizes, **parts})
    cp_volta.checkpoint_layers(model, 1)
    model = _wrapped(cp_volta.patch_for_cp(model, cp), cp, wrap)
    shards = [
        cp_volta.shard_batch(b, cp) for b in _batches("unequal", cp.dp_size * micro)[cp.dp_rank :: cp.dp_size]
    ]
    count, sum_ = cp_volta.count_tokens([s.labels for s in shards if s.labels is not None], cp), 0.0
    for shard in shards:
        loss = cp_volta.total(model(**shard.with_labels(count)).loss, cp)
        loss.backward()
        sum_ += float(loss.detach())
    if wrap == "plain":
        cp_volta.reduce_gradients(model, cp)
    bare = model.module if wrap == "ddp" else model
    grads = {n: _full(p.grad) for n, p in bare.named_parameters() if p.grad is not None}
    return Found(sum_, float(cp_volta.clip_grad_norm(model, 1.0)), grads)


@pytest.mark.parametrize("parts", PARTS)
def test_a_tiled_model_over_ranks_has_the_loss_and_gradients_of_one_device(parts: str) -> None:
    for found in run_ranks(_tiled, 2, ZIGZAG, "plain", PARTS[parts], 1):
        _near(found, _one_device("unequal", 1))


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_with_accumulation_and_wrapped_too(wrap: str) -> None:
    for found in run_ranks(_tiled, 4, ULYSSES, wrap, {}, 2):
        _near(found, _one_device("unequal", 4))


class Trained(NamedTuple):
    losses: list[float]
    norms: list[float]
    text: str
    plan: str
    weights: dict[str, Tensor]


SEQ, STEPS = 64, 6


def _train(rank: int, mode: Mode | None, optimizer: str, how: dict[str, Any]) -> Trained:
    """Steps of a prepared model; mode None: one device, nothing sharded."""
    cp = None if mode is None else mode.group()
    model: nn.Module = build("tiny-qwen2-4h", device="cpu", dtype=torch.float32)
    ready = cp_volta.prepare(model, seq=SEQ, cp=cp, optimizer=optimizer, lr=1e-3, **how)  # type: ignore[arg-type]
    assert ready.optimizer is not None
    texts, losses, norms = tokens(STEPS, SEQ, "cpu"), [], []
    for step in range(STEPS):
        ids = texts[step : step + 1]
        loss = ready.loss({"input_ids": ids, "labels": ids})
        ready.scaler.scale(loss).backward()
        ready.scaler.unscale_(ready.optimizer)
        norms.append(float(cp_volta.clip_grad_norm(model, 0.5)))
        ready.scaler.step(ready.optimizer)
        ready.scaler.update()
        ready.optimizer.zero_grad()
        losses.append(float(loss.detach()))
    weights = {name: _full(p.detach()) for name, p in model.named_parameters()}
    return Trained(losses, norms, ready.text(), str(ready.plan.choice), weights)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_host"])
@pytest.mark.parametrize("mode", [ZIGZAG, ULYSSES], ids=["zigzag", "ulysses"])
def test_prepared_over_ranks_it_trains_as_on_one(mode: Mode, optimizer: str) -> None:
    how = {"dtype": torch.float32, "budget_bytes": 1 << 30}
    (want,) = run_ranks(_train, 1, None, optimizer, how)
    assert want.losses[-1] < want.losses[0]
    for found in run_ranks(_train, 2, mode, optimizer, how):
        assert found.losses == pytest.approx(want.losses, rel=1e-5)
        assert found.norms == pytest.approx(want.norms, rel=1e-3)
        for name, weight in want.weights.items():
            torch.testing.assert_close(found.weights[name], weight, rtol=1e-3, atol=2e-4)
        assert "ranks: 1 sequences at once, each over ring" in found.text


def test_in_fp16_from_fp32_shards_with_a_scaler_it_is_near_one_devices_autocast() -> None:
    (want,) = run_ranks(_train, 1, None, "adamw", {})
    for found in run_ranks(_train, 2, ZIGZAG, "adamw", {}):
        assert found.losses == pytest.approx(want.losses, rel=2e-3)
        assert found.norms == pytest.approx(want.norms, rel=3e-2)
        assert "float16, with GradScaler (parameters in torch.float32: FSDP2 casts shards)" in found.text


def _unequal_budgets(rank: int) -> Trained:
    return _train(rank, ZIGZAG, "adamw", {"dtype": torch.float32, "budget_bytes": (1 << 30) + (rank << 29)})


def test_ranks_with_unequal_budgets_make_one_plan() -> None:
    first, second = run_ranks(_unequal_budgets, 2)
    assert first.plan == second.plan
    assert "budget: 1.00 GiB" in second.text


def _lora(rank: int) -> list[float]:
    from probes.models.build import with_adapters

    model = with_adapters(build("tiny-qwen2-4h", device="cpu", dtype=torch.float16), 4)
    ready = cp_volta.prepare(model, seq=SEQ, cp=ZIGZAG.group(), lr=1e-2)
    assert ready.optimizer is not None
    ids, losses = tokens(1, SEQ, "cpu"), []
    for _ in range(6):
        loss = ready.loss({"input_ids": ids, "labels": ids})
        ready.scaler.scale(loss).backward()
        ready.scaler.step(ready.optimizer)
        ready.scaler.update()
        ready.optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert all("lora_" in name for name, p in model.named_parameters() if p.grad is not None)
    return losses


def test_adapters_train_over_ranks() -> None:
    first, second = run_ranks(_lora, 2)
    assert first == second
    assert first[-1] < first[0] - 0.1


def _refused(rank: int) -> list[str]:
    cp, said = ZIGZAG.group(), []
    for how in (
        {"seq": 33},
        {"seq": SEQ, "optimizer": "adamw8bit"},
        {"seq": SEQ, "budget_bytes": 1 << 20},
    ):
        model = _model()
        before = {name: sorted(m.__dict__) for name, m in model.named_modules()}
        with pytest.raises((ValueError, DoesNotFit)) as error:
            cp_volta.prepare(model, cp=cp, **how)  # type: ignore[arg-type]
        said.append(str(error.value))
        assert {name: sorted(m.__dict__) for name, m in model.named_modules()} == before
    ready = cp_volta.prepare(_model(), seq=SEQ, cp=cp)
    with pytest.raises(ValueError, match="at least one micro-batch"):
        ready.loss({"input_ids": tokens(1, SEQ, "cpu")})
    return said


def test_what_cannot_be_prepared_is_refused_on_every_rank_the_model_unchanged() -> None:
    for said in run_ranks(_refused, 2):
        assert "33 tokens cannot be spread evenly over 2 ranks" in said[0]
        assert "bitsandbytes has no 8-bit states for FSDP2's shards" in said[1]
        assert "tokens a rank do not fit 0.00 GiB" in said[2]
