"""A model in training on N ranks against the stock one on one: logits, gradients, and the curve of many updates.

Three times the same training, each in processes of its own: N ranks on shards; the stock model on one device with
transformers' own attention, loss and labels, and torch's clipping; and that again in float64 throughout. Parameters
are float32; fp16 and bf16 are autocast, fp16 with a GradScaler.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cp_volta
from cp_volta.group import CpGroup, init_cp_group
from harness.cells import Task
from harness.rows import Result
from probes import ranks
from probes.cp_axes import shared_note
from probes.cp_parity import CpParityAxes
from probes.float64 import float64_everywhere
from probes.models.build import DTYPES, build
from probes.parity import Losses, compare
from probes.text import tokens

LEARNING_RATE = 1e-3
CLIP = 0.5
SCALE = 1024.0


@dataclass(kw_only=True)
class Trained:
    """What a training left, on the host. Gradients are those of the first step, before they were clipped."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    logits: Tensor = field(default_factory=lambda: torch.empty(0))
    grads: dict[str, Tensor] = field(default_factory=dict)
    moved: Tensor = field(default_factory=lambda: torch.empty(0))  # all weights at the end less at the start


def run(axes: CpParityAxes, task: Task) -> Result:
    """Three trainings, then the verdict."""
    sides: list[Trained] = []
    for size, wide in ((axes.cp_size, False), (1, False), (1, True)):
        folder = Path(task.folder) / f"side{len(sides)}"
        folder.mkdir()
        found = ranks.result(_rank, size, (axes, task, wide), axes=axes, task=task, folder=folder)
        if isinstance(found, Result):
            return found
        sides.append(found[0])
    return judge(axes, task, *sides)


def judge(axes: CpParityAxes, task: Task, candidate: Trained, stock: Trained, ruler: Trained) -> Result:
    """Candidate and stock against float64: every tensor, and every step's loss and gradient norm."""
    parity = compare(
        _tensors(candidate),
        _tensors(stock),
        _tensors(ruler),
        dtype=DTYPES[axes.dtype],
        reference_name="float64, the stock model on one device",
        losses={
            f"{what} of step {step}": Losses(candidate=one, eager=eager, reference=true)
            for what in ("losses", "norms")
            for step, (one, eager, true) in enumerate(
                zip(getattr(candidate, what), getattr(stock, what), getattr(ruler, what), strict=True), 1
            )
        },
    )
    note = shared_note(axes, task.device)
    return Result(
        verdict=parity.verdict,
        verdict_reason=parity.reason,
        parity=parity,
        loss=tuple(candidate.losses),
        facts={
            "updates": axes.updates,
            "first_loss": candidate.losses[0],
            "last_loss": candidate.losses[-1],
            "last_loss_of_one_device": stock.losses[-1],
            "largest_norm": max(candidate.norms),
            "clipped_at": CLIP,
            "cosine_of_all_updates": float(F.cosine_similarity(candidate.moved, ruler.moved, dim=0)),
            "cosine_of_all_updates_one_device": float(F.cosine_similarity(stock.moved, ruler.moved, dim=0)),
        },
        notes=(note,) if note else (),
    )


def _tensors(side: Trained) -> dict[str, Tensor]:
    return {
        "logits": side.logits,
        **side.grads,
        f"all weights' change in {len(side.losses)} steps": side.moved,
    }


def _rank(rank: int, axes: CpParityAxes, task: Task, wide: bool) -> Trained | None:
    model: nn.Module = build(
        axes.model, device=task.device, dtype=torch.float32, attention="eager", seed=task.seed
    )
    if wide:
        model = model.double()  # drawn in float64, the weights would be others
    found = Trained()
    with float64_everywhere() if wide else contextlib.nullcontext():
        _train(model, axes, task, wide, found)
    return found if rank == 0 else None


def _train(model: nn.Module, axes: CpParityAxes, task: Task, wide: bool, found: Trained) -> None:
    cp = _group(axes, task)
    if cp:
        cp_volta.patch_for_cp(model, cp, kernel=axes.attention)
    start = _flat(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    scaled = axes.dtype == "fp16" and not wide
    scaler: Any = (
        cp_volta.grad_scaler(cp, init_scale=SCALE, enabled=scaled)
        if cp
        else torch.amp.GradScaler(task.device, init_scale=SCALE, enabled=scaled)
    )
    texts = tokens(axes.updates * axes.batch, axes.seq, task.device).split(axes.batch)
    for ids in texts:
        optimizer.zero_grad()
        with _autocast(axes, task, wide):
            logits, loss = _on_shards(model, ids, cp) if cp else _stock(model, ids)
        scaler.scale(loss).backward()
        if cp:
            cp_volta.reduce_gradients(model, cp)
        scaler.unscale_(optimizer)
        if not found.losses:
            found.logits = (cp_volta.gather(logits, cp, axes.seq) if cp else logits.detach()).cpu()
            found.grads = {
                n: p.grad.detach().cpu().clone() for n, p in model.named_parameters() if p.grad is not None
            }
        clip = cp_volta.clip_grad_norm if cp else _clip
        found.norms.append(float(clip(model, CLIP)))
        scaler.step(optimizer)
        scaler.update()
        found.losses.append(float(loss.detach()))
    found.moved = _flat(model) - start


def _group(axes: CpParityAxes, task: Task) -> CpGroup | None:
    """Of the ranks of this training; None where it has one alone."""
    if torch.distributed.get_world_size() == 1:
        return None
    return init_cp_group(axes.cp_size, ulysses=axes.ulysses, layout=axes.layout, device_type=task.device)


def _on_shards(model: nn.Module, ids: Tensor, cp: CpGroup) -> tuple[Tensor, Tensor]:
    shard = cp_volta.shard_batch({"input_ids": ids, "labels": ids}, cp)
    assert shard.labels is not None
    logits: Tensor = model(**shard.inputs).logits
    return logits, cp_volta.cp_loss(logits, shard.labels, cp)


def _stock(model: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
    out = model(input_ids=ids, labels=ids, use_cache=False)
    return out.logits, out.loss


def _clip(model: nn.Module, most: float) -> Tensor:
    return torch.nn.utils.clip_grad_norm_(model.parameters(), most)


@contextlib.contextmanager
def _autocast(axes: CpParityAxes, task: Task, wide: bool) -> Iterator[None]:
    with torch.autocast(task.device, dtype=DTYPES[axes.dtype], enabled=axes.dtype != "fp32" and not wide):
        yield


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten().cpu().double() for p in model.parameters()])
