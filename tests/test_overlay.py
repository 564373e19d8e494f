"""An overlay changes a module's forward and nothing else: memory is freed at once, FSDP2 may stand on it, copies work."""

from __future__ import annotations

import copy
import gc
import inspect
import weakref
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from cp_volta.checkpoint import checkpoint_layers
from cp_volta.preparing import prepare
from cp_volta.tiling import tile, untile
from probes.models.build import build
from tests.test_tiled_loss import same, step


@pytest.mark.parametrize(
    "change",
    [tile, checkpoint_layers, lambda model: prepare(model, seq=40)],
    ids=["tile", "checkpoint", "prepare"],
)
def test_a_model_that_nobody_holds_is_freed_without_the_garbage_collector(change: Any) -> None:
    """On a device it is gigabytes, which the next model needs."""
    gc.collect()
    gc.disable()
    try:
        model = build("tiny-qwen2-4h", device="cpu", dtype=torch.float32)
        change(model)
        step(model)
        head = weakref.ref(model.lm_head.weight)
        del model
        assert head() is None
    finally:
        gc.enable()


def test_tiles_come_off_and_go_on_again_under_fsdp2(one_rank: None) -> None:
    model = build("tiny-qwen3-6h", device="cpu", dtype=torch.float32)
    wanted = step(model)
    tile(model, loss=7, mlp=7, norms=7, projections=7)
    for layer in model.model.layers:
        for part in (layer.mlp, layer.self_attn, layer):
            fully_shard(part)
    fully_shard(model)
    for change in (
        lambda: None,
        lambda: untile(model),
        lambda: tile(model, mlp=5, projections=5),
        lambda: untile(model),
    ):
        change()
        loss, grads = step(model)
        same(
            (loss, {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in grads.items()}), wanted
        )


def test_the_class_keeps_its_name_its_signature_and_its_kin() -> None:
    model = build("tiny-qwen2-4h", device="cpu", dtype=torch.float32)
    before, forward = type(model), inspect.signature(model.forward)
    tile(model)
    assert type(model).__name__ == before.__name__
    assert isinstance(model, before)
    assert inspect.signature(model.forward) == forward
    untile(model)
    assert type(model) is before


def test_what_stood_in_the_instance_comes_back_and_a_copy_is_its_own() -> None:
    model = build("tiny-qwen2-4h", device="cpu", dtype=torch.float32)
    calls = []
    under = type(model.model.norm).forward
    model.model.norm.forward = lambda x: calls.append(1) or under(model.model.norm, x)
    mine = model.model.norm.forward
    tile(model, loss=False, mlp=False, projections=False)
    step(model)
    assert not calls
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.norm.weight.zero_()
    untile(model)
    assert model.model.norm.forward is mine
    step(model)
    assert calls
    assert step(other)[0] != step(model)[0]
