"""One cell of N ranks: timed steps on shards, bytes against the formula, gradients against one device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cp_volta import traffic
from cp_volta.comm import Tally, counting
from cp_volta.group import init_cp_group
from cp_volta.layout import score_area
from harness.cells import Task
from harness.rows import Collective, CompileReport, Memory, Parity, Result
from probes import ranks
from probes.cp_axes import shared_note
from probes.cp_step import CpStepAxes
from probes.cp_step.exposed import collectives
from probes.cp_step.shared import Shared
from probes.models import shape_of, train_flops
from probes.models.build import DTYPES
from probes.train_step.compiler_view import cudagraph_skips, look
from probes.train_step.timing import Timed
from probes.train_step.timing import run as take_steps


@dataclass
class OfRank:
    """What one rank found."""

    first_step_s: float | None
    step_s: list[float]
    loss: tuple[float, ...]
    memory: Memory
    tallies: dict[str, Tally]
    expected_bytes: int
    score_area: int
    compile: CompileReport | None
    on_device: dict[str, float]  # seconds in collectives, from the profiler; with NCCL alone
    parity: Parity | None


def run(axes: CpStepAxes, task: Task) -> Result:
    """Start the ranks, and make one result of what they found."""
    found = ranks.result(_rank, axes.cp_size, (axes, task), axes=axes, task=task)
    if isinstance(found, Result):
        return found
    return _result(axes, task, found)


def _result(axes: CpStepAxes, task: Task, found: list[OfRank]) -> Result:
    shape = shape_of(axes.model)
    areas = [one.score_area for one in found]
    sent = [sum(tally.bytes_sent for tally in one.tallies.values()) for one in found]
    expected = [one.expected_bytes for one in found]
    parity = found[0].parity
    right = sent == expected
    verdict, reason = (parity.verdict, parity.reason) if parity else (None, "")
    if not right:
        verdict, reason = "mismatch", f"bytes sent by rank {sent}, by the formula {expected}"
    notes = [
        "bytes are attention's, of one step and the busiest rank; those of gradients and of sharded weights are not in them"
    ]
    if shared := shared_note(axes, task.device):
        notes.append(shared)
    facts: dict[str, Any] = {
        "devices": axes.cp_size if axes.backend_on(task.device) == "nccl" else 1,
        "bytes_sent": max(sent),
        "bytes_by_formula": max(expected),
        "score_area_busiest_over_mean": max(areas) * len(areas) / sum(areas),
    }
    for rank, one in enumerate(found):
        peak = one.memory.allocated_peak_bytes
        facts[f"rank{rank}_peak_bytes"] = one.memory.host_peak_bytes if peak is None else peak
    facts |= {name: max(one.on_device[name] for one in found) for name in found[0].on_device}
    slowest = [max(times) for times in zip(*(one.step_s for one in found), strict=True)]
    return Result(
        verdict=verdict,
        verdict_reason=reason,
        tokens_per_step=axes.batch * axes.seq,
        first_step_s=max((one.first_step_s or 0.0) for one in found),
        step_s=tuple(slowest),
        loss=found[0].loss,
        flops_per_step=train_flops(shape, axes.batch, axes.seq) if shape else None,
        memory=max(
            (one.memory for one in found), key=lambda m: m.allocated_peak_bytes or m.host_peak_bytes or 0
        ),
        compile=found[0].compile,
        parity=parity,
        collectives=_collectives(found),
        facts=facts,
        notes=tuple(notes),
    )


def _collectives(found: list[OfRank]) -> dict[str, Collective]:
    """Of each kind, the rank that sent most."""
    kinds = {kind for one in found for kind in one.tallies}
    most = {
        kind: max((one.tallies[kind] for one in found if kind in one.tallies), key=lambda t: t.bytes_sent)
        for kind in kinds
    }
    return {k: Collective(calls=t.calls, bytes_sent=t.bytes_sent, seconds=t.seconds) for k, t in most.items()}


def _rank(rank: int, axes: CpStepAxes, task: Task) -> OfRank:
    cp = init_cp_group(axes.cp_size, ulysses=axes.ulysses, layout=axes.layout, device_type=task.device)
    shared = Shared(axes, task, cp)
    timed = Timed()
    with cudagraph_skips() as skips:
        take_steps(shared.step, task.measure, task.device, timed)
    with counting() as ledger:
        shared.step()
    return OfRank(
        first_step_s=timed.first_step_s,
        step_s=timed.step_s,
        loss=timed.losses(),
        memory=timed.memory(),
        tallies=ledger.tallies,
        expected_bytes=expected_bytes(shared.training.model.config, axes, rank),
        score_area=score_area(
            cp.ring_group.rank(), cp.ring, axes.seq // cp.ring, causal=True, layout=cp.layout
        ),
        compile=look(shared.training.model, skips) if axes.compile != "none" else None,
        on_device=collectives(shared.step) if axes.backend_on(task.device) == "nccl" else {},
        parity=shared.check(rank) if task.measure.check else None,
    )


def expected_bytes(config: Any, axes: CpStepAxes, rank: int) -> int:
    """What the formulas say that attention sends in one step: every layer, a checkpointed forward again."""
    one = traffic.attention(
        batch=axes.batch,
        seq=axes.seq,
        dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        itemsize=DTYPES[axes.dtype].itemsize,
        query=config.num_attention_heads,
        kv=config.num_key_value_heads,
        ring_ranks=axes.cp_size // axes.ulysses,
        ulysses_ranks=axes.ulysses,
        rank=rank,
    )
    return int(config.num_hidden_layers * ((1 + axes.checkpointing) * one.forward + one.backward))
