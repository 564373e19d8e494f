"""Layers computed twice, and their inputs in host memory: the same gradients, less memory, and the limit kept."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from cp_volta import host_memory
from cp_volta.checkpoint import checkpoint_layers, uncheckpoint
from cp_volta.host_memory import CHUNK_BYTES, HostMemory, available_bytes
from cp_volta.offload import Offloader
from cp_volta.tiling import tile
from probes.models.build import build
from tests.allocations import allocations
from tests.test_tiled_loss import same, step

Wanted = tuple[PreTrainedModel, tuple[float, dict[str, Tensor]]]


@pytest.fixture(scope="module", params=["tiny-qwen2-4h", "tiny-qwen3-6h"])
def stock(request: pytest.FixtureRequest) -> Wanted:
    model = build(request.param, device="cpu", dtype=torch.float32)
    return model, step(model)


@pytest.fixture(autouse=True)
def _as_before(stock: Wanted) -> Iterator[None]:
    torch._dynamo.reset()
    yield
    uncheckpoint(stock[0])


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("layers", [0, 1, None])
@pytest.mark.parametrize("offload", [False, 1, True])
def test_gradients_are_the_same_for_any_number_of_layers(
    stock: Wanted, tiled: bool, layers: int | None, offload: bool | int
) -> None:
    model, wanted = stock
    if layers == 0 and offload is not False:
        return
    with _tiled(model, tiled):
        checkpoint_layers(model, layers, offload=offload)
        same(step(model), wanted)
        same(step(model), wanted)  # chunks are used again


@contextlib.contextmanager
def _tiled(model: PreTrainedModel, on: bool) -> Iterator[None]:
    from cp_volta.tiling import untile

    if on:
        tile(model, loss=8, mlp=8, norms=8, projections=8)
    yield
    untile(model)


def test_counts_say_what_went_where_and_nothing_is_held_after_a_step(stock: Wanted) -> None:
    model, wanted = stock
    offloader = checkpoint_layers(model, offload=True)
    assert offloader
    step(model)
    assert (offloader.offloaded, offloader.kept) == (2, 0)
    assert offloader.host.peak_bytes == 2 * CHUNK_BYTES
    gc.collect()
    assert offloader.host.used_bytes == 0
    assert len(offloader.host.free) == 2
    offloader.host.release()
    assert offloader.host.taken_bytes == 0
    same(step(model), wanted)


def test_the_hosts_limit_is_kept_and_the_rest_stays_on_the_device(stock: Wanted) -> None:
    model, wanted = stock
    offloader = checkpoint_layers(model, offload=True, host_limit_bytes=CHUNK_BYTES + 1)
    assert offloader
    same(step(model), wanted)
    assert (offloader.offloaded, offloader.kept) == (1, 1)
    assert offloader.host.taken_bytes <= CHUNK_BYTES + 1


def test_a_step_under_autocast_and_two_micro_batches_accumulate(stock: Wanted) -> None:
    model, _ = stock
    torch.manual_seed(0)
    batches = [torch.randint(0, 512, (1, 15)) for _ in range(2)]

    def grads() -> dict[str, Tensor]:
        model.zero_grad()
        for ids in batches:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    wanted = grads()
    checkpoint_layers(model, offload=True)
    found = grads()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], grad) for name, grad in wanted.items())


def test_a_graph_kept_for_a_second_backward_loads_again(stock: Wanted) -> None:
    model, _ = stock
    checkpoint_layers(model, offload=True)
    ids = torch.randint(0, 512, (1, 9))
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward(retain_graph=True)
    once = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    loss.backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, 2 * once[name])  # type: ignore[arg-type]


def test_dropout_is_drawn_the_same_way_twice() -> None:
    model = build("tiny-qwen2-4h", device="cpu", dtype=torch.float32, attention="eager")
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    wanted = step(model)
    checkpoint_layers(model, offload=True)
    same(step(model), wanted)


def test_checkpointed_layers_save_less(stock: Wanted) -> None:
    model, _ = stock
    ids = torch.randint(0, 512, (1, 800))
    peaks = []
    for layers in (0, 1, 2):
        checkpoint_layers(model, layers)
        model.zero_grad()
        with allocations() as seen:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        peaks.append(seen.peak_bytes)
    assert peaks[2] < peaks[1] < peaks[0]


def test_a_whole_compiled_model_is_one_graph_and_refuses_offload() -> None:
    model = build("tiny-qwen3-6h", device="cpu", dtype=torch.float32)
    wanted = step(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    checkpoint_layers(model)
    same(step(compiled), (wanted[0], {f"_orig_mod.{name}": g for name, g in wanted[1].items()}))  # type: ignore[arg-type]
    torch._dynamo.reset()
    checkpoint_layers(model, offload=True)
    with pytest.raises(Exception, match="offload from inside a compiled graph"):
        step(compiled)  # type: ignore[arg-type]


def test_it_can_be_undone_and_asked_anew(stock: Wanted) -> None:
    model, wanted = stock
    assert uncheckpoint(model) == 0
    before = [dict(layer.__dict__) for layer in model.model.layers]
    checkpoint_layers(model)
    assert all(layer.gradient_checkpointing for layer in model.model.layers)
    checkpoint_layers(model, 1)
    assert uncheckpoint(model) == 1
    assert [dict(layer.__dict__) for layer in model.model.layers] == before
    same(step(model), wanted)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"layers": 3}, "layers=3: 0 to 2, or None for all"),
        ({"layers": 1, "offload": 2}, "offload=2: 0 to 1, or True for all"),
        ({"host_limit_bytes": 5}, "without anything to offload"),
        ({"offload": True, "host_limit_bytes": -1}, "at least 0"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(stock: Wanted, how: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        checkpoint_layers(stock[0], **how)


# The store alone ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_what_comes_back_is_bit_for_bit_what_left_over_several_chunks(dtype: torch.dtype) -> None:
    offloader = Offloader(HostMemory(limit_bytes=1 << 20, pinned=False, chunk_bytes=256))
    given = [torch.randn(n, 7).to(dtype) for n in (1, 40, 33)]
    stored = [offloader.store(t) for t in given]
    assert all(s.resident is None for s in stored)
    for tensor, kept in reversed(list(zip(given, stored, strict=True))):
        assert torch.equal(offloader.load(kept), tensor)
    assert stored[0].coming is None


def test_the_one_below_is_fetched_before_it_is_asked_for() -> None:
    offloader = Offloader(HostMemory(limit_bytes=1 << 20, pinned=False, chunk_bytes=256))
    below, above = (offloader.store(torch.randn(5)) for _ in range(2))
    offloader.load(above)
    assert below.coming is not None


def test_available_memory_is_that_of_the_container_where_it_is_smaller(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert available_bytes() > 1 << 20
    monkeypatch.setattr(host_memory, "_meminfo", lambda: 100)
    monkeypatch.setattr(host_memory, "_cgroup", lambda: 40)
    assert available_bytes() == 40
    monkeypatch.setattr(host_memory, "_cgroup", lambda: None)
    assert available_bytes() == 100
