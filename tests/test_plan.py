"""The plan: its prediction against what a CPU really allocates, what it chooses, and how it refuses."""

from __future__ import annotations

import dataclasses
import gc
import subprocess
import sys

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import tc_volta
from cp_volta.checkpoint import checkpoint_layers
from cp_volta.memory_model import host_bytes, moments
from cp_volta.planning import GIB, DoesNotFit, again, longest, plan, predict
from cp_volta.step import Choice, Shape, Work
from cp_volta.tiling import tile
from probes.models import PRESETS
from probes.models.build import config_of
from tests.allocations import allocations
from tests.conftest import ROOT

QWEN = Shape(hidden=1536, mlp=8960, layers=28, heads=12, kv_heads=2, head_dim=128, vocab=151_936, tied=True)
SMALL = Shape(hidden=128, mlp=448, layers=4, heads=4, kv_heads=2, head_dim=32, vocab=2048, tied=True)
TOKENS = 1200
ALL = {"loss": 256, "mlp": 256, "norms": 256, "projections": 256}


def small(dtype: torch.dtype) -> PreTrainedModel:
    preset = msgspec.structs.replace(
        PRESETS["tiny-qwen2-4h"],
        **{name: getattr(SMALL, name) for name in ("hidden", "mlp", "heads", "kv_heads", "head_dim")},
        layers=SMALL.layers,
        vocab=SMALL.vocab,
    )
    made: PreTrainedModel = AutoModelForCausalLM.from_config(
        config_of(preset), dtype=dtype, attn_implementation=tc_volta.attention_name("flash")
    )
    return made.train()


def measured(model: PreTrainedModel, choice: Choice, amp: bool) -> int:
    sizes = {name: getattr(choice, name) or False for name in ALL}
    tile(model, **sizes)
    offloader = checkpoint_layers(model, choice.checkpointed, offload=choice.offloaded)
    ids = torch.randint(0, SMALL.vocab, (1, TOKENS))
    model.zero_grad()
    gc.collect()
    with allocations() as seen:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=amp):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
    return seen.peak_bytes - (offloader.host.taken_bytes if offloader else 0)


@pytest.mark.parametrize(("kind", "param", "compute"), [("fp32", 4, 4), ("bf16", 2, 2), ("amp", 4, 2)])
def test_the_predicted_peak_is_within_five_percent_of_what_a_cpu_allocates(
    kind: str, param: int, compute: int
) -> None:
    model = small(torch.bfloat16 if kind == "bf16" else torch.float32)
    work = Work(tokens=TOKENS, param_bytes=param, residual_bytes=param, compute_bytes=compute, kernel="cpu")
    stock = (Choice(), Choice(checkpointed=4), Choice(loss=256, checkpointed=2))
    tiled = (Choice(**ALL), Choice(**ALL, checkpointed=2), Choice(**ALL, checkpointed=4, offloaded=4))
    for choice in (*(stock if kind == "fp32" else stock[:1]), *tiled):
        peak = predict(SMALL, work, choice).peak
        predicted = peak.bytes - peak.parts["parameters"]  # they were there before
        found = measured(model, choice, kind == "amp")
        assert abs(predicted / found - 1) <= 0.05, (choice, peak, found)


def test_it_needs_no_torch() -> None:
    code = (
        "import sys; from cp_volta import plan, fit, Shape; plan.__call__; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "qwen2.5-7b", "qwen3-4b", "llama-3.2-1b"])
def test_a_shape_counts_the_parameters_that_the_preset_has(name: str) -> None:
    preset = PRESETS[name]
    fields = [field.name for field in dataclasses.fields(Shape)]
    shape = Shape(**{field: getattr(preset, field) for field in fields})
    assert abs(shape.parameters / preset.parameters - 1) < 1e-3


def half(tokens: int) -> Work:
    return Work(tokens=tokens, param_bytes=2, residual_bytes=2, compute_bytes=2)


def test_a_short_sequence_needs_nothing_twice_and_a_longer_one_ever_more() -> None:
    made = [
        plan(QWEN, half(t), budget_bytes=31 * GIB, host_limit_bytes=200 * GIB)
        for t in (2048, 65_536, 262_144)
    ]
    assert made[0].again == 0
    assert not made[0].choice.mlp
    assert made[0].again < made[1].again < made[2].again
    assert [p.choice.offloaded > 0 for p in made] == [False, False, True]
    assert made[2].choice.checkpointed == 28
    assert all(p.peak.bytes <= 31 * GIB for p in made)


def test_half_a_million_tokens_fit_32_gib_forward_and_backward() -> None:
    made = plan(QWEN, half(524_288), budget_bytes=31 * GIB, host_limit_bytes=64 * GIB)
    assert made.host_bytes <= 64 * GIB
    assert "pinned host memory" in made.text()


def test_the_hosts_limit_is_respected_or_the_refusal_names_it() -> None:
    with pytest.raises(DoesNotFit, match=r"524288 tokens .* 5 of 28 checkpoints in 8.00 GiB of host memory"):
        plan(QWEN, half(524_288), budget_bytes=31 * GIB, host_limit_bytes=8 * GIB)


def test_a_model_that_is_too_large_for_the_card_says_what_of() -> None:
    work = Work(tokens=1024, optimizer="adamw")
    with pytest.raises(DoesNotFit, match=r"predicted peak is .* GiB at .*optimizer 11.50 GiB"):
        plan(QWEN, work, budget_bytes=16 * GIB)
    assert longest(QWEN, lambda t: dataclasses.replace(work, tokens=t), budget_bytes=16 * GIB) is None


def test_the_longest_sequence_grows_with_every_means() -> None:
    def most(**how: object) -> int:
        work = Work(tokens=1, **how)  # type: ignore[arg-type]
        found = longest(
            QWEN,
            lambda t: dataclasses.replace(work, tokens=t),
            budget_bytes=31 * GIB,
            host_limit_bytes=200 * GIB,
        )
        assert found
        return found.work.tokens

    resident, eight, host = (most(optimizer=o) for o in ("adamw", "adamw8bit", "adamw_host"))
    assert 131_072 <= resident < eight < host
    assert most(optimizer="adamw", trainable=0.01, param_bytes=2) > resident
    assert most(optimizer="adamw", shards=4) > resident


def test_the_longest_is_the_longest() -> None:
    found = longest(QWEN, half, budget_bytes=8 * GIB, step=512)
    assert found
    with pytest.raises(DoesNotFit):
        plan(QWEN, half(found.work.tokens + 512), budget_bytes=8 * GIB)


def test_work_done_twice_is_a_third_of_a_step_where_every_layer_is_checkpointed() -> None:
    layers_only = dataclasses.replace(QWEN, vocab=1)
    assert abs(again(layers_only, half(8192), Choice(checkpointed=28)) - 1 / 3) < 1e-4
    tiled = again(layers_only, half(8192), Choice(loss=1, mlp=1, checkpointed=28))
    assert tiled < 1 / 3  # the last product of an MLP is not computed again
    assert again(QWEN, half(8192), Choice()) == 0


def test_a_peak_is_the_sum_of_its_parts_and_no_part_is_negative() -> None:
    for choice in (Choice(), Choice(**ALL, checkpointed=28, offloaded=7)):
        for work in (half(8192), Work(tokens=8192, optimizer="adamw", shards=4)):
            for moment in moments(QWEN, work, choice):
                assert moment.bytes == sum(moment.parts.values())
                assert min(moment.parts.values()) >= 0, moment


def test_states_on_the_host_are_host_memory() -> None:
    work = Work(tokens=8, optimizer="adamw_host")
    assert host_bytes(QWEN, work, Choice()) == 8 * QWEN.parameters
    assert host_bytes(QWEN, half(1000), Choice(checkpointed=28, offloaded=3)) == 3 * 1000 * 1536 * 2


@pytest.mark.parametrize(
    "bad", [{"tokens": 0}, {"tokens": 1, "kernel": "flsh"}, {"tokens": 1, "trainable": 2.0}]
)
def test_work_that_makes_no_sense_is_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="tokens|kernel"):
        Work(**bad)  # type: ignore[arg-type]


def test_every_public_name_of_the_package_is_there_and_another_is_an_error() -> None:
    import cp_volta

    for name in cp_volta.__all__:
        assert getattr(cp_volta, name).__module__.startswith("cp_volta.")
    with pytest.raises(AttributeError, match="'tyle'; there are"):
        _ = cp_volta.tyle  # type: ignore[attr-defined]
