"""Whole models on shards: logits, loss and every parameter's gradient are those of one device; what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from cp_volta.comm import counting
from cp_volta.group import init_cp_group
from cp_volta.patch import patch_for_cp, patch_llama, patch_qwen2, unpatch
from probes.models.build import build
from tc_volta.errors import Unsupported
from tests.ranks import run_ranks
from tests.test_cp_attention import Mode

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
SEQ = 48
MODES = [Mode(2, 1, "zigzag"), Mode(2, 1, "contiguous"), Mode(2, 2, "contiguous"), Mode(4, 2, "zigzag")]


def _model(preset: str) -> nn.Module:
    torch.manual_seed(0)
    return build(preset, device="cpu", dtype=torch.float32)


def _batch() -> tuple[Tensor, Tensor]:
    """Tokens, and the label of each: the next token, some ignored."""
    ids = torch.randint(0, 512, (1, SEQ), generator=torch.Generator().manual_seed(1))
    shifted = F.pad(ids[:, 1:], (0, 1), value=-100)
    shifted[:, 5:17] = -100
    return ids, shifted


def _loss(logits: Tensor, shifted: Tensor, count: int) -> Tensor:
    return (
        F.cross_entropy(logits.flatten(0, 1), shifted.flatten(), ignore_index=-100, reduction="sum") / count
    )


def _one(preset: str) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    model, (ids, shifted) = _model(preset), _batch()
    logits = model(input_ids=ids).logits
    loss = _loss(logits, shifted, int((shifted != -100).sum()))
    loss.backward()
    return logits.detach(), loss.detach(), {n: p.grad for n, p in model.named_parameters()}


def _shared(rank: int, mode: Mode, preset: str, how: str) -> Any:
    model, (ids, shifted), cp = _model(preset), _batch(), mode.group()
    at = cp.positions(SEQ)
    patch_for_cp(model, cp)
    if how == "checkpoint":
        model.gradient_checkpointing_enable()
        model.train()
    call: Callable[..., Any] = (
        torch.compile(model, backend="aot_eager", fullgraph=True) if how == "compile" else model
    )
    seen = []
    model.get_decoder().layers[0].register_forward_hook(lambda m, a, out: seen.append(out.shape[1]) or None)
    with counting() as ledger:
        logits = call(input_ids=ids[:, at]).logits
    loss = _loss(logits, shifted[:, at], int((shifted != -100).sum()))
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    loss = loss.detach()
    dist.all_reduce(loss)
    grads = {n: p.grad for n, p in model.named_parameters()}
    return at, logits.detach(), loss, grads, ledger.bytes_sent, seen


def _near(got: Tensor, want: Tensor, what: str) -> None:
    error = (got - want).double().norm() / want.double().norm().clamp_min(1e-12)
    assert error < 5e-6, f"{what}: {error:.2e}"


@pytest.mark.parametrize("how", ["plain", "checkpoint", "compile"])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_model_on_shards_is_the_model(mode: Mode, how: str) -> None:
    """NeMo Automodel #2918: the patch fires; verl #7476: activations really are of the shard's length."""
    logits, loss, grads = _one("tiny-qwen2-4h")
    for at, its_logits, its_loss, its_grads, sent, seen in run_ranks(
        _shared, mode.cp, mode, "tiny-qwen2-4h", how
    ):
        _near(its_logits, logits[:, at], "logits")
        _near(its_loss, loss, "loss")
        for name, grad in grads.items():
            _near(its_grads[name], grad, name)
        assert sent > 0
        assert set(seen) <= {SEQ // mode.cp}


@pytest.mark.parametrize("preset", ["tiny-qwen2-6h", "tiny-qwen3-4h", "tiny-llama-4h"])
def test_of_every_family(preset: str) -> None:
    logits, _, grads = _one(preset)
    for at, its_logits, _, its_grads, *_ in run_ranks(_shared, 2, Mode(2, 1, "zigzag"), preset, "plain"):
        _near(its_logits, logits[:, at], "logits")
        for name, grad in grads.items():
            _near(its_grads[name], grad, name)


def _autocast(rank: int, dtype: torch.dtype) -> Any:
    model, (ids, _), cp = _model("tiny-qwen2-4h"), _batch(), init_cp_group(2)
    at = cp.positions(SEQ)
    with torch.autocast("cpu", dtype=dtype):
        want = model(input_ids=ids).logits[:, at]
    patch_for_cp(model, cp)
    with torch.autocast("cpu", dtype=dtype), counting() as ledger:
        got = model(input_ids=ids[:, at]).logits
    got.sum().backward()
    return got.detach(), want.detach(), ledger.bytes_sent


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_keys_travel_and_meet_in_its_dtype(dtype: torch.dtype) -> None:
    """Rotary positions come out as float32 there, values in half: three dtypes of one attention."""
    config: Any = _model("tiny-qwen2-4h").config
    width = config.num_key_value_heads * config.hidden_size // config.num_attention_heads
    for got, want, sent in run_ranks(_autocast, 2, dtype):
        assert got.dtype == want.dtype
        assert (got - want).abs().max() < 0.05 * want.abs().max()
        assert sent == config.num_hidden_layers * 2 * SEQ // 2 * width * 2  # k and v, one hop, two bytes each


def _packed(rank: int, mode: Mode) -> Any:
    model, (ids, _), cp = _model("tiny-qwen2-4h"), _batch(), mode.group()
    position_ids = torch.cat([torch.arange(n) for n in (13, 30, 5)])[None]
    documents = torch.cat([torch.full((n,), i, dtype=torch.int32) for i, n in enumerate((13, 30, 5))])[None]
    want = model(input_ids=ids, position_ids=position_ids).logits
    patch_for_cp(model, cp)
    at = cp.positions(SEQ)
    got = model(input_ids=ids[:, at], position_ids=position_ids[:, at], documents=documents).logits
    return got.detach(), want[:, at].detach()


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_packed_documents_are_what_transformers_makes_of_them(mode: Mode) -> None:
    """axolotl #3608."""
    for got, want in run_ranks(_packed, mode.cp, mode):
        _near(got, want, "logits")


def _refusals(rank: int) -> list[str]:
    said: list[str] = []

    def refused(call: Callable[[], object]) -> None:
        with pytest.raises((ValueError, Unsupported)) as caught:
            call()
        said.append(str(caught.value))

    model, (ids, _), cp = _model("tiny-qwen2-4h"), _batch(), init_cp_group(2)
    refused(lambda: unpatch(model))
    refused(lambda: patch_llama(model, cp))
    refused(lambda: patch_for_cp(model, cp, mode="ulysses"))
    refused(lambda: patch_for_cp(model, cp, mode="rings"))
    refused(lambda: patch_for_cp(nn.Linear(2, 2), cp))
    model.config.attention_dropout = 0.1
    refused(lambda: patch_for_cp(model, cp))
    model.config.attention_dropout = 0.0
    before = model.config._attn_implementation
    patch_qwen2(model, cp, mode="ring")
    refused(lambda: patch_for_cp(model, cp))
    half = ids[:, cp.positions(SEQ)]
    refused(lambda: model(input_ids=half, attention_mask=torch.ones_like(half)))
    refused(lambda: model(input_ids=half, position_ids=torch.arange(half.shape[1])[None]))
    refused(lambda: model(input_ids=half, labels=half))
    refused(lambda: model(input_ids=half[:, :7]))
    unpatch(model)
    assert model.config._attn_implementation == before
    assert model(input_ids=ids, use_cache=True).past_key_values is not None
    return said


def test_what_cannot_be_honoured_is_refused_on_every_rank_with_a_message() -> None:
    """LlamaFactory #10474, prime-rl #2392 and the like: nothing is ignored in silence."""
    said = run_ranks(_refusals, 2)
    assert said[0] == said[1]
    for message, words in zip(
        said[0],
        (
            "not patched",
            "patch_llama takes a llama model; this is qwen2",
            "mode 'ulysses', but the group is ring 2 x ulysses 1",
            "mode 'rings' is none",
            "Linear is no transformers decoder",
            "attention_dropout is 0.1",
            "patched already",
            "attention_mask is given",
            "position_ids are not those",
            "labels without shift_labels",
            "14 tokens does not divide into 4 parts",
        ),
        strict=True,
    ):
        assert words in message
