"""The longest sequence that trains: a model, a method, some cards and their memory in; a prediction out. No torch.

Predicted, not measured: the memory from `cp_volta.memory_model`, the time from the operations of a step at an
assumed share of the card's peak (`UTILISATION`, about what the reference had on a V100). Verify by a run.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from cp_volta.planning import DoesNotFit, Plan, gib, longest, plan
from cp_volta.step import EIGHT_BIT_SHARDED, Optimizer, Shape, Work

Method = Literal["full", "8bit", "host", "lora"]
METHODS: dict[str, str] = {
    "full": "fp32 parameters, autocast to fp16, AdamW's states on the device",
    "8bit": "the same with AdamW's states in 8 bits (bitsandbytes)",
    "host": "the same with AdamW's states in host memory",
    "lora": "fp16 parameters frozen, adapters of rank 16 in fp32",
}
UTILISATION = 0.30
CONTEXT_BYTES = 700 << 20  # a CUDA context and cuBLAS' workspaces; NCCL's buffers with several cards
NCCL_BYTES = 600 << 20
_LORA_RANK = 16


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The longest sequence of one method on so many cards, and what it takes."""

    method: Method
    cards: int
    seq: int
    mode: str
    ulysses: int  # of the cards, how many deal heads out
    plan: Plan
    step_s: float | None
    call: str
    launch: str

    def text(self) -> str:
        """For a person; says that it is predicted."""
        time = (
            f"{self.step_s:,.0f} s a step"
            if self.step_s is not None
            else "time unknown: no peak of this card"
        )
        return (
            f"{self.method} on {self.cards}: {self.seq:,} tokens, {self.mode}, {gib(self.plan.peak.bytes)} a card, "
            f"{gib(self.plan.host_bytes)} pinned a card, {time} (predicted)\n  {self.launch}\n  {self.call}"
        )


def fit(
    shape: Shape,
    method: Method,
    *,
    cards: int = 1,
    budget_bytes: int,
    host_bytes: int,
    kernel: str = "efficient",
    flops_per_s: float | None = None,
    seq: int | None = None,
) -> Fit:
    """The longest sequence, or `seq`, of one full training step with the given means.

    budget_bytes: of one card, its context included. host_bytes: of the machine, shared by its cards.
    flops_per_s: the card's peak in fp16; None where it is not known, and the time then too.
    Raises DoesNotFit (a ValueError) where not even a short sequence, or `seq`, fits, and for 8-bit states over
    several cards; ValueError for bad words.
    """
    _check(method, cards, seq)
    room = budget_bytes - CONTEXT_BYTES - (NCCL_BYTES if cards > 1 else 0)
    limits = {"budget_bytes": room, "host_limit_bytes": host_bytes // cards}
    work = _work(shape, method, cards, kernel)

    def of(tokens: int) -> Work:
        return dataclasses.replace(work, tokens=tokens)

    made = plan(shape, of(seq // cards), **limits) if seq else longest(shape, of, **limits)
    if made is None:
        made = plan(shape, of(1024), **limits)  # raises, with the parts
    total = made.work.tokens * cards
    ulysses = cards if shape.heads % cards == 0 else 1
    return Fit(
        method=method,
        cards=cards,
        seq=total,
        mode=_mode(cards, ulysses),
        ulysses=ulysses,
        plan=made,
        step_s=_seconds(shape, made, cards, flops_per_s),
        call=_call(total, cards, ulysses, room, made),
        launch=f"torchrun --standalone --nproc-per-node {cards} train.py" if cards > 1 else "python train.py",
    )


def _check(method: str, cards: int, seq: int | None) -> None:
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}; there are {', '.join(METHODS)}")
    if cards < 1:
        raise ValueError(f"{cards} cards: at least 1")
    if method == "8bit" and cards > 1:
        raise DoesNotFit(EIGHT_BIT_SHARDED)
    if seq is not None and (seq < cards or seq % cards):
        raise ValueError(f"a sequence of {seq} tokens cannot be spread evenly over {cards} cards")


def _work(shape: Shape, method: str, cards: int, kernel: str) -> Work:
    optimizer: dict[str, Optimizer] = {"8bit": "adamw8bit", "host": "adamw_host"}
    work = Work(tokens=1, optimizer=optimizer.get(method, "adamw"), shards=cards, cp=cards, kernel=kernel)
    if cards > 1:  # FSDP2 hands the layers fp16 parameters and activations
        work = dataclasses.replace(work, residual_bytes=2)
    if method == "lora":
        share = lora_parameters(shape, _LORA_RANK) / shape.parameters
        work = dataclasses.replace(work, param_bytes=2, residual_bytes=2, trainable=share)
    return work


def lora_parameters(shape: Shape, rank: int) -> int:
    """Of adapters of this rank on all seven products of every layer."""
    q, k = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    ends = 2 * (shape.hidden + q) + 2 * (shape.hidden + k) + 3 * (shape.hidden + shape.mlp)
    return shape.layers * rank * ends


def _mode(cards: int, ulysses: int) -> str:
    """Ulysses while every rank has whole query heads; else a ring, balanced by zigzag shards."""
    if cards == 1:
        return "one card"
    return "cp ulysses" if ulysses > 1 else "cp ring, zigzag"


def step_flops(shape: Shape, seq: int) -> float:
    """Operations of one forward and backward over `seq` tokens, nothing counted twice; attention causal."""
    per_token = 6 * (shape.layers * shape.layer_parameters + shape.head_parameters)
    return seq * (per_token + 12 * shape.layers * shape.heads * shape.head_dim * (seq + 1) / 2)


def _seconds(shape: Shape, made: Plan, cards: int, flops_per_s: float | None) -> float | None:
    if flops_per_s is None:
        return None
    once = step_flops(shape, made.work.tokens * cards) / cards
    return once * (1 + made.again) / (flops_per_s * UTILISATION)


def _call(seq: int, cards: int, ulysses: int, room: int, made: Plan) -> str:
    words = [f"seq={seq}", f"budget_bytes={room}", f"host_limit_bytes={made.host_bytes}"]
    words.append(f"optimizer={made.work.optimizer!r}")
    if cards > 1:
        words.append(f"cp=init_cp_group(ulysses={ulysses})")
    return f"prepare(model, {', '.join(words)})"


__all__ = ["METHODS", "DoesNotFit", "Fit", "Method", "fit", "lora_parameters", "step_flops"]
