"""The ways of one job, by arithmetic; the card and its links are asked for where they are here."""

from __future__ import annotations

from cp_volta.memory_model import moments
from cp_volta.step import Choice, Work
from cp_volta.ways import Job, Way, cost, prefer, ways
from harness.cells import Task
from harness.hardware import inventory
from harness.rows import Fact, Result
from probes.cp_plan import CpPlanAxes
from probes.fit import kernel_of, shape_of
from probes.links import Link, link_here
from probes.peaks import peak_flops_per_s

_ITEMSIZE = {"fp32": 4, "fp16": 2, "bf16": 2}
_ASSUMED_CARD = "Tesla V100-SXM2-32GB"
_UTILISATION = 0.5  # of the peak, in a fused attention kernel: a plan's assumption, no measurement
_GIB = 1 << 30


def run(axes: CpPlanAxes, task: Task) -> Result:
    """One row: the preferred way as its reason, every way as a note, their figures as facts."""
    job = Job(
        shape=shape_of(axes.model),
        seq=axes.seq,
        ranks=axes.cp_size,
        batch=axes.batch,
        itemsize=_ITEMSIZE[axes.dtype],
        recomputed=axes.checkpointing,
    )
    card, card_source = _card(axes.card)
    peak, peak_source = peak_flops_per_s(card, "fp32" if axes.dtype == "fp32" else "fp16")
    if peak is None:
        return Result(status="unsupported", reason=f"no rates to plan with: {peak_source}")
    link = Link(axes.link_gb_s, "given") if axes.link_gb_s else link_here()
    rates = {"flops_per_s": _UTILISATION * peak, "link_bytes_per_s": link.gb_s * 1e9}
    found = ways(job)
    preferred = prefer(job, found, **rates)
    if preferred is None:
        return Result(status="unsupported", reason="; ".join(f"{w.name}: {w.why_not}" for w in found))
    memory = _memory_bytes(axes, job, kernel_of(card))
    facts: dict[str, Fact] = {
        "preferred": preferred[0].name,
        "card": card,
        "link_gb_s": link.gb_s,
        "predicted_peak_bytes": memory,
    }
    for way in found:
        facts |= _facts(job, way, rates)
    assumed = (
        f"by arithmetic, nothing was run: {card} ({card_source}) at {_UTILISATION:.0%} of its peak in attention, "
        f"{link.gb_s:.0f} GB/s between ranks ({link.source}); predicted {memory / _GIB:.1f} GiB a rank with parameters "
        "and gradients sharded"
    )
    return Result(
        verdict="ok",
        verdict_reason=f"prefer {preferred[0].name}: {preferred[1]}",
        facts=facts,
        notes=(assumed, *(_line(job, way, rates) for way in found)),
    )


def _card(asked: str) -> tuple[str, str]:
    if asked:
        return asked, "given"
    cards = inventory().cards
    return (cards[0].name, "here") if cards else (_ASSUMED_CARD, "assumed: no card is here")


def _memory_bytes(axes: CpPlanAxes, job: Job, kernel: str) -> int:
    """Predicted peak of a rank: half parameters over the ranks, all layers checkpointed or none."""
    size = job.itemsize
    work = Work(
        tokens=job.seq * job.batch // job.ranks,
        param_bytes=size,
        residual_bytes=size,
        compute_bytes=size,
        shards=job.ranks,
        cp=job.ranks,
        kernel=kernel,
    )
    choice = Choice(checkpointed=job.shape.layers if axes.checkpointing else 0)
    return max(moment.bytes for moment in moments(job.shape, work, choice))


def _facts(job: Job, way: Way, rates: dict[str, float]) -> dict[str, Fact]:
    if way.why_not:
        return {f"{way.name}: why not": way.why_not}
    price = cost(job, way, **rates)
    return {
        f"{way.name}: forward_bytes": way.forward_bytes,
        f"{way.name}: backward_bytes": way.backward_bytes,
        f"{way.name}: imbalance": way.imbalance,
        f"{way.name}: scores_s": price.scores_s,
        f"{way.name}: waiting_s": price.waiting_s,
    }


def _line(job: Job, way: Way, rates: dict[str, float]) -> str:
    if way.why_not:
        return f"{way.name}: not possible: {way.why_not}"
    price = cost(job, way, **rates)
    return (
        f"{way.name}: {price.total_s * 1e3:.2f} ms a layer, {price.waiting_s * 1e3:.2f} of it waiting; sends "
        f"{way.forward_bytes / 2**20:,.1f} MiB forward and {way.backward_bytes / 2**20:,.1f} backward; busiest rank "
        f"{way.imbalance:.2f}x the mean"
    )
