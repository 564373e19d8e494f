"""prepare: one call, its decisions and its refusals; AdamW with its states on the host; fit."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import math
import re

import msgspec
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from cp_volta import overlay
from cp_volta.fitting import METHODS, Fit, fit, lora_parameters, step_flops
from cp_volta.group import init_cp_group
from cp_volta.host_adamw import SLICE, HostAdamW
from cp_volta.planning import GIB, DoesNotFit, predict
from cp_volta.preparing import prepare, shape_of, unprepare
from cp_volta.step import Choice, Shape
from probes.models import PRESETS, train_flops
from probes.models.build import build, config_of
from tests.test_tiled_loss import same, step

MIB = 1 << 20
QWEN = Shape(hidden=1536, mlp=8960, layers=28, heads=12, kv_heads=2, head_dim=128, vocab=151_936, tied=True)


def batch(seq: int = 40) -> torch.Tensor:
    return torch.randint(0, 512, (1, seq), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_host"])
def test_a_prepared_model_trains_in_fp16_with_a_scaler(optimizer: str) -> None:
    model = build("tiny-qwen2-4h", device="cpu", dtype=torch.float32)
    ready = prepare(model, seq=40, lr=1e-3, optimizer=optimizer)  # type: ignore[arg-type]
    assert ready.amp
    assert ready.scaler.is_enabled()
    assert ready.optimizer is not None
    losses = []
    for _ in range(8):
        with ready.autocast():
            loss = model(input_ids=batch(), labels=batch()).loss
        ready.scaler.scale(loss).backward()
        ready.scaler.step(ready.optimizer)
        ready.scaler.update()
        ready.optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.3


def test_the_prepared_models_loss_and_gradients_are_the_stock_ones() -> None:
    model = build("tiny-qwen3-4h", device="cpu", dtype=torch.float32)
    wanted = step(model)
    ready = prepare(model, seq=200_000, dtype=torch.float32, optimizer="none", budget_bytes=900 * MIB)
    assert ready.plan.choice.checkpointed
    assert ready.plan.choice.mlp
    assert not ready.amp
    assert not ready.scaler.is_enabled()
    assert ready.optimizer is None
    model.set_attn_implementation("sdpa")
    same(step(model), wanted)
    unprepare(model)
    assert not any(overlay.is_on(module) for module in model.modules())
    same(step(model), wanted)


def test_it_says_what_it_decided_and_why() -> None:
    model = build("tiny-qwen3-4h", device="cpu", dtype=torch.float32)
    text = prepare(model, seq=200_000, budget_bytes=900 * MIB).text()
    for line in (
        r"precision: float16, with GradScaler \(parameters in torch.float32: autocast\)",
        r"attention: cpu",
        r"rows of a tile: torch's operations \(there is no CUDA device\)",
        r"positions: 200000 tokens, RoPE default \(beyond the model's native window of 32768",
        r"loss: tiles of \d+ tokens",
        r"checkpoints: \d of 2 layers",
        r"predicted peak: 0.\d\d GiB",
    ):
        assert re.search(line, text), (line, text)


def test_what_must_be_offloaded_is_and_the_hosts_limit_holds() -> None:
    preset = msgspec.structs.replace(PRESETS["tiny-qwen2-4h"], layers=6)
    model = AutoModelForCausalLM.from_config(config_of(preset), dtype=torch.float32).train()
    how = {"seq": 100_000, "dtype": torch.float32, "optimizer": "none"}
    work = prepare(model, **how).plan.work  # type: ignore[arg-type]
    tiles = {"loss": 256, "mlp": 1024, "norms": 1024, "projections": 1024, "checkpointed": 6}
    peaks = [predict(shape_of(model), work, Choice(**tiles, offloaded=n)).peak.bytes for n in (0, 6)]
    assert peaks[1] < peaks[0]
    how["budget_bytes"] = int(sum(peaks) / 2 / 0.96)  # between the two, margin allowed for
    with pytest.raises(DoesNotFit, match="0 of 6 checkpoints in 0.00 GiB of host memory"):
        prepare(model, host_limit_bytes=0, **how)  # type: ignore[arg-type]
    ready = prepare(model, host_limit_bytes=GIB, **how)  # type: ignore[arg-type]
    assert ready.offloader is not None
    assert 0 < ready.plan.host_bytes <= GIB
    step(model)
    assert ready.offloader.offloaded == ready.plan.choice.offloaded


def test_nothing_is_changed_where_it_does_not_fit() -> None:
    model = build("tiny-qwen2-4h", device="cpu", dtype=torch.float32)
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    with pytest.raises(DoesNotFit, match="100000 tokens a rank do not fit 0.00 GiB"):
        prepare(model, seq=100_000, budget_bytes=MIB)
    assert {name: dict(module.__dict__) for name, module in model.named_modules()} == before


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"optimizer": "adam"}, "unknown optimizer 'adam'; there are none, adamw, adamw8bit, adamw_host"),
        ({"seq": 0}, "0 tokens"),
    ],
)
def test_what_makes_no_sense_is_refused(how: dict[str, object], message: str) -> None:
    model = build("tiny-qwen2-4h", device="cpu", dtype=torch.float32)
    with pytest.raises(ValueError, match=message):
        prepare(model, **{"seq": 8, **how})  # type: ignore[arg-type]


def test_fp16_parameters_are_no_training_and_nothing_to_train_is_none() -> None:
    model = build("tiny-qwen2-4h", device="cpu", dtype=torch.float16)
    with pytest.raises(ValueError, match="GradScaler refuses them"):
        prepare(model, seq=8)
    assert prepare(model, seq=8, optimizer="none").plan.work.param_bytes == 2
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="nothing to train"):
        prepare(model, seq=8)


@pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is not None, reason="bitsandbytes is here: nothing to refuse"
)
def test_8_bit_states_without_bitsandbytes_say_what_is_missing() -> None:
    model = build("tiny-qwen2-4h", device="cpu", dtype=torch.float32)
    with pytest.raises(ValueError, match="adamw8bit needs bitsandbytes"):
        prepare(model, seq=8, optimizer="adamw8bit")


@pytest.mark.parametrize("name", ["qwen2.5-7b", "qwen3-0.6b", "llama-3.2-1b"])
def test_a_configuration_has_the_shape_of_its_preset(name: str) -> None:
    class Model(nn.Module):
        config = config_of(PRESETS[name])

    found = dataclasses.asdict(shape_of(Model()))
    assert found == {field: getattr(PRESETS[name], field) for field in found}


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_host"])
def test_sharded_with_fsdp2_it_trains_from_fp32_shards_in_half(one_rank: None, optimizer: str) -> None:
    model = build("tiny-qwen3-6h", device="cpu", dtype=torch.float32)
    plain = step(model)[0]
    cp = init_cp_group()
    ready = prepare(model, seq=40, dtype=torch.bfloat16, cp=cp, optimizer=optimizer, lr=1e-2)  # type: ignore[arg-type]
    assert not ready.amp
    assert "FSDP2 casts shards" in ready.text()
    assert math.isclose(step(model)[0], plain, rel_tol=1e-2)
    assert ready.optimizer is not None
    ready.optimizer.step()
    assert step(model)[0] < plain
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_adapters_in_fp32_over_a_frozen_fp16_model_train_under_autocast() -> None:
    from tests.test_tiling import lora

    model = lora(build("tiny-qwen2-4h", device="cpu", dtype=torch.float16))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    ready = prepare(model, seq=40, lr=1e-2)
    assert ready.amp
    assert 0 < ready.plan.work.trainable < 0.5
    assert ready.plan.work.residual_bytes == 2
    assert ready.optimizer is not None
    losses = []
    for _ in range(6):
        with ready.autocast():
            loss = model(input_ids=batch(), labels=batch()).loss
        ready.scaler.scale(loss).backward()
        ready.scaler.step(ready.optimizer)
        ready.scaler.update()
        ready.optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1


# AdamW with its states on the host ------------------------------------------------------------------------------


def test_it_is_torchs_adamw_step_for_step() -> None:
    torch.manual_seed(0)
    mine = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    theirs = copy.deepcopy(mine)
    how = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    pairs = (
        (mine, HostAdamW(mine.parameters(), **how)),
        (theirs, torch.optim.AdamW(theirs.parameters(), **how)),
    )  # type: ignore[arg-type]
    x = torch.randn(4, 7)
    for _ in range(5):
        for model, optimizer in pairs:
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-7)


def test_a_parameter_longer_than_a_slice_is_updated_to_its_end() -> None:
    p = nn.Parameter(torch.ones(SLICE + 5))
    optimizer = HostAdamW([p], lr=0.5, weight_decay=0.0)
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert torch.allclose(p, torch.full_like(p, 0.5))
    assert optimizer.host_bytes() == 8 * (SLICE + 5)


def test_a_saved_state_goes_on_as_if_never_stopped() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(6, 6)
    other = copy.deepcopy(layer)
    first, second = (HostAdamW(m.parameters(), lr=0.1) for m in (layer, other))

    def go(model: nn.Module, optimizer: HostAdamW) -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 6)).square().sum().backward()
        optimizer.step()

    go(layer, first)
    other.load_state_dict(layer.state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    go(layer, first)
    go(other, second)
    assert all(torch.equal(a, b) for a, b in zip(layer.parameters(), other.parameters(), strict=True))


def test_half_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match="takes float32 parameters"):
        HostAdamW([nn.Parameter(torch.ones(2).half())])


# fit ------------------------------------------------------------------------------------------------------------


def found(method: str, **how: object) -> Fit:
    return fit(QWEN, method, **{"budget_bytes": 32 * GIB, "host_bytes": 200 * GIB, **how})  # type: ignore[arg-type]


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_an_answer_that_fits_and_a_command(method: str) -> None:
    one = found(method, flops_per_s=125e12)
    assert one.seq >= 131_072
    assert one.plan.peak.bytes < 32 * GIB
    assert one.step_s
    assert f"seq={one.seq}" in one.call
    assert "(predicted)" in one.text()


def test_four_cards_hold_at_least_four_times_as_much_as_one() -> None:
    four = found("full", cards=4, host_bytes=800 * GIB)
    assert four.seq >= max(4 * found("full").seq, 1_048_576)
    assert four.mode == "cp ulysses"
    assert found("full", cards=8, seq=8192).mode == "cp ring, zigzag"  # 12 heads
    assert "--nproc-per-node 4" in four.launch
    assert "cp=init_cp_group(ulysses=4)" in four.call
    with pytest.raises(DoesNotFit, match="no 8-bit states for FSDP2's shards"):
        found("8bit", cards=4)


def test_a_given_length_is_planned_or_refused_with_its_parts() -> None:
    assert found("full", seq=8192).seq == 8192
    with pytest.raises(DoesNotFit, match="optimizer 11.50 GiB"):
        found("full", budget_bytes=16 * GIB)
    with pytest.raises(ValueError, match="1000 tokens cannot be spread evenly over 3"):
        found("full", cards=3, seq=1000)
    with pytest.raises(ValueError, match="unknown method 'fll'; there are full, 8bit, host, lora"):
        found("fll")


def test_the_time_is_unknown_where_the_cards_peak_is() -> None:
    assert found("full").step_s is None
    assert "time unknown" in found("full").text()


def test_operations_and_adapters_are_counted_as_elsewhere() -> None:
    mine, theirs = step_flops(QWEN, 8192), train_flops(PRESETS["qwen2.5-1.5b"], 1, 8192)
    assert abs(mine / theirs - 1) < 1e-3
    assert lora_parameters(QWEN, 16) == 18_464_768  # what peft prints for rank 16 on all seven products
