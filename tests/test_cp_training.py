"""Training on shards is training on one device: loss, gradients, their norm, the scaler, 50 steps. Real processes."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import cp_volta
from cp_volta.group import CpGroup
from cp_volta.sharding import IGNORED
from probes.models.build import build
from probes.text import tokens
from tests.ranks import run_ranks
from tests.test_cp_attention import Mode

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
SEQ, PRESET = 32, "tiny-qwen2-4h"
ZIGZAG, ULYSSES = Mode(2, 1, "zigzag"), Mode(2, 2, "contiguous")


class Found(NamedTuple):
    loss: float
    norm: float
    grads: dict[str, Tensor]


def _model() -> nn.Module:
    torch.manual_seed(0)
    return build(PRESET, device="cpu", dtype=torch.float32)


def _batches(how: str, count: int) -> list[dict[str, Tensor]]:
    """One batch for each sequence that is worked on, with unequal numbers of labels that count."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for i in range(count):
        ids = torch.randint(0, 512, (1, SEQ), generator=generator)
        labels = ids.clone()
        if how == "one label":
            labels[:, 1:] = IGNORED
            labels[:, 1] = ids[:, 1] if i == 0 else IGNORED
        elif how == "empty shard":
            labels[:, SEQ // 2 :] = IGNORED
        elif how == "none":
            labels[:] = IGNORED
        else:
            labels[:, : 7 * i] = IGNORED
        found.append({"input_ids": ids, "labels": labels})
    return found


def _one_device(how: str, count: int) -> Found:
    """The mean over all tokens of all batches, in one process."""
    model = _model()
    total, tokens = torch.zeros(()), 0
    for batch in _batches(how, count):
        logits = model(input_ids=batch["input_ids"]).logits
        labels = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
        total = total + F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        tokens += int((labels != IGNORED).sum())
    loss = total / max(tokens, 1)
    loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return Found(float(loss.detach()), float(norm), grads)


def _wrapped(model: nn.Module, cp: CpGroup, wrap: str) -> nn.Module:
    if wrap == "fsdp2":
        for layer in model.get_decoder().layers:  # type: ignore[operator]
            fully_shard(layer, mesh=cp.dp_cp_mesh)
        fully_shard(model, mesh=cp.dp_cp_mesh)
    if wrap == "ddp":
        model = DistributedDataParallel(model, process_group=cp.dp_cp_group)
    if wrap != "plain":
        cp_volta.sum_gradients(model, cp)
    return model


def _full(grad: Tensor) -> Tensor:
    return grad.full_tensor() if hasattr(grad, "full_tensor") else grad.clone()


def _on_ranks(rank: int, mode: Mode, wrap: str, how: str, micro: int) -> Found:
    """One step over dp x cp, `micro` batches one after the other on each of the dp sequences."""
    cp = mode.group()
    model = _wrapped(cp_volta.patch_for_cp(_model(), cp), cp, wrap)
    batches = _batches(how, cp.dp_size * micro)[cp.dp_rank :: cp.dp_size]
    shards = [cp_volta.shard_batch(batch, cp) for batch in batches]
    tokens = cp_volta.count_tokens([s.labels for s in shards if s.labels is not None], cp)
    total = 0.0
    for shard in shards:
        assert shard.labels is not None
        loss = cp_volta.cp_loss(model(**shard.inputs).logits, shard.labels, cp, tokens=tokens)
        loss.backward()
        total += float(loss.detach())
    if wrap == "plain":
        cp_volta.reduce_gradients(model, cp)
    bare = model.module if wrap == "ddp" else model
    grads = {n: _full(p.grad) for n, p in bare.named_parameters() if p.grad is not None}
    norm = cp_volta.clip_grad_norm(model, 1.0)
    after = [_full(p.grad) for p in bare.parameters() if p.grad is not None]
    clipped = float(torch.linalg.vector_norm(torch.stack([g.norm() for g in after])))
    assert clipped == pytest.approx(min(1.0, float(norm)), rel=1e-4)
    return Found(total, float(norm), grads)


def _near(found: Found, want: Found) -> None:
    assert found.loss == pytest.approx(want.loss, rel=2e-6, abs=1e-7)
    assert found.norm == pytest.approx(want.norm, rel=1e-5, abs=1e-7)
    assert found.grads.keys() == want.grads.keys()
    scale = max(float(g.norm()) for g in want.grads.values()) or 1.0
    for name, grad in want.grads.items():
        assert float((found.grads[name] - grad).norm()) <= 1e-5 * scale, name


@pytest.mark.parametrize("wrap", ["plain", "ddp", "fsdp2"])
@pytest.mark.parametrize(("mode", "world"), [(ZIGZAG, 2), (ULYSSES, 4)], ids=["cp2", "dp2 x cp2"])
def test_loss_gradients_and_norm_do_not_depend_on_who_shares_the_work(
    mode: Mode, world: int, wrap: str
) -> None:
    """DeepSpeed 5248, Megatron 673 and 1124: a factor of cp in the norm, or in the loss."""
    want = _one_device("unequal", world // mode.cp)
    for found in run_ranks(_on_ranks, world, mode, wrap, "unequal", 1):
        _near(found, want)


@pytest.mark.parametrize("how", ["one label", "empty shard", "none"])
def test_a_shard_whose_labels_are_all_ignored_adds_nothing(how: str) -> None:
    """axolotl 3026, Megatron 1764: NaN; Megatron 7513: one valid token, and cp=2 halves the gradient."""
    want = _one_device(how, 1)
    for found in run_ranks(_on_ranks, 2, Mode(2, 1, "contiguous"), "plain", how, 1):
        assert math.isfinite(found.loss)
        _near(found, want)
    assert (want.loss == 0.0) == (how == "none")


@pytest.mark.parametrize("wrap", ["plain", "ddp", "fsdp2"])
def test_accumulation_over_batches_of_unequal_token_counts(wrap: str) -> None:
    want = _one_device("unequal", 3)
    for found in run_ranks(_on_ranks, 2, ZIGZAG, wrap, "unequal", 3):
        _near(found, want)


def _evaluate(rank: int) -> tuple[float, Tensor, Tensor]:
    cp, (batch,) = ZIGZAG.group(), _batches("unequal", 1)
    batch = {name: x[:, : SEQ - 3] for name, x in batch.items()}
    model = cp_volta.patch_for_cp(_model(), cp)
    shard = cp_volta.shard_batch(batch, cp)
    assert shard.labels is not None
    with torch.no_grad():
        logits = model(**shard.inputs).logits
        whole = cp_volta.gather(logits, cp, shard.seq)
        stock = _model()(input_ids=batch["input_ids"]).logits
        return float(cp_volta.cp_loss(logits, shard.labels, cp)), whole, stock


def test_the_loss_of_an_evaluation_is_not_multiplied_and_gathered_logits_are_the_models() -> None:
    """transformers 48167: eval_loss was cp times the true one. The length is one that has to be padded."""
    for loss, whole, stock in run_ranks(_evaluate, 2):
        labels = _batches("unequal", 1)[0]["labels"][:, 1 : SEQ - 3]
        want = F.cross_entropy(stock[:, :-1].flatten(0, 1), labels.flatten())
        assert loss == pytest.approx(float(want), rel=2e-6)
        torch.testing.assert_close(whole, stock, rtol=1e-4, atol=1e-5)


def _overflow(rank: int, wrap: str, fused: bool, unscale: bool, ranks: tuple[int, ...]) -> list[Any]:
    cp = ZIGZAG.group()
    model = _wrapped(cp_volta.patch_for_cp(_model(), cp), cp, wrap)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    scaler = cp_volta.grad_scaler(cp, init_scale=256.0, growth_interval=2)
    (batch,) = _batches("unequal", 1)
    shard, seen = cp_volta.shard_batch(batch, cp), []
    assert shard.labels is not None
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(cp_volta.cp_loss(model(**shard.inputs).logits, shard.labels, cp)).backward()
        if wrap == "plain":
            cp_volta.reduce_gradients(model, cp)
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        if step == 1 and rank in ranks:  # after the reduction: the others can't have seen it
            local = grads[-1].to_local() if wrap == "fsdp2" else grads[-1]  # type: ignore[attr-defined]
            local.view(-1)[0] = torch.inf
        before = [_full(p.detach()) for p in model.parameters()]
        if unscale:
            scaler.unscale_(optimizer)
            cp_volta.clip_grad_norm(model, 1.0)
        scaler.step(optimizer)
        scaler.update()
        after = [_full(p.detach()) for p in model.parameters()]
        moved = any(not torch.equal(a, b) for a, b in zip(after, before, strict=True))
        seen.append((moved, scaler.get_scale()))
    return [*seen, {float(_full(state["step"])) for state in optimizer.state.values()}]


@pytest.mark.parametrize("wrap", ["plain", "fsdp2"])
@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
@pytest.mark.parametrize("unscale", [True, False], ids=["clipped", "step alone"])
@pytest.mark.parametrize("ranks", [(1,), (0, 1)], ids=["on one", "on both"])
def test_an_overflow_on_a_rank_is_a_skipped_step_on_all(
    wrap: str, fused: bool, unscale: bool, ranks: tuple[int, ...]
) -> None:
    """torch's ShardedGradScaler fails with fused optimizers, or skips on one rank, or counts steps backwards."""
    for seen in run_ranks(_overflow, 2, wrap, fused, unscale, ranks):
        assert seen == [(True, 256.0), (False, 128.0), (True, 128.0), {2.0}]


STEPS = 50


def _curve(rank: int, mode: Mode | None) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses and norms of 50 steps with clipping on text, and the weights at the end; mode None: one device."""
    cp = (mode or Mode(1, 1, "contiguous")).group()
    model = _model()
    if mode:
        cp_volta.patch_for_cp(model, cp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, norms, texts = [], [], tokens(STEPS, SEQ, "cpu")
    for step in range(STEPS):
        ids = texts[step : step + 1]
        shard = cp_volta.shard_batch({"input_ids": ids, "labels": ids}, cp)
        assert shard.labels is not None
        optimizer.zero_grad()
        loss = cp_volta.cp_loss(model(**shard.inputs).logits, shard.labels, cp)
        loss.backward()
        cp_volta.reduce_gradients(model, cp)
        norms.append(float(cp_volta.clip_grad_norm(model, 0.5)))
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, norms, {n: p.detach() for n, p in model.named_parameters()}


def test_fifty_steps_with_clipping_are_those_of_one_device() -> None:
    (want,) = run_ranks(_curve, 1, None)
    found = run_ranks(_curve, 2, ZIGZAG)
    assert want[0][-1] < want[0][0] - 0.5  # it learns: the curve is none that a frozen model would give
    assert max(want[1]) > 0.5  # and it clips
    for losses, norms, weights in found:
        assert losses == pytest.approx(want[0], rel=1e-5)
        assert norms == pytest.approx(want[1], rel=1e-3)
        for name, weight in want[2].items():
            cosine = F.cosine_similarity(weights[name].flatten(), weight.flatten(), dim=0)
            assert float(cosine) > 1 - 5e-7, name
    for name in want[2]:
        assert torch.equal(found[0][2][name], found[1][2][name]), name


def _refusals(rank: int) -> list[str]:
    cp, said = Mode(2, 1, "contiguous").group(), []

    def refused(call: Any) -> None:
        try:
            call()
            said.append("nothing")
        except ValueError as error:
            said.append(str(error))

    ids = torch.full((1, 8), rank)
    refused(lambda: cp_volta.shard_batch({"input_ids": ids}, cp))
    refused(lambda: cp_volta.shard_batch({"input_ids": ids[:, : 8 - rank]}, cp))
    refused(lambda: cp_volta.sum_gradients(nn.Linear(2, 2), cp))
    refused(
        lambda: cp_volta.reduce_gradients(
            DistributedDataParallel(nn.Linear(2, 2), process_group=cp.group), cp
        )
    )
    alone = [dist.new_group([0]), dist.new_group([1])]
    refused(
        lambda: cp_volta.sum_gradients(
            DistributedDataParallel(nn.Linear(2, 2), process_group=alone[rank]), cp
        )
    )
    refused(lambda: cp_volta.cp_loss(torch.zeros(1, 4, 8), torch.zeros(1, 3), cp))
    return said


def test_wrong_calls_have_one_message_on_every_rank() -> None:
    """axolotl 3218: a sampler that counts cp ranks as data-parallel ones."""
    wanted = [
        "different batches",
        "different batches",
        "neither by fully_shard nor by DDP",
        "sum_gradients once",
        "DDP works over 1 ranks, dp x cp are 2",
        r"labels are [1, 3], logits [1, 4, 8]",
    ]
    for said in run_ranks(_refusals, 2):
        assert len(said) == len(wanted)
        for message, words in zip(said, wanted, strict=True):
            assert words in message


def test_the_norm_of_half_precision_gradients_does_not_overflow() -> None:
    layer = nn.Linear(2, 1, bias=False).half()
    layer.weight.grad = torch.full((1, 2), 4096.0).half()
    assert float(cp_volta.clip_grad_norm(layer, 1.0)) == pytest.approx(4096 * math.sqrt(2))
    assert layer.weight.grad.float().norm() == pytest.approx(1.0, rel=1e-3)
