"""One attention layer on N ranks against float64 on one; whole models are in whole.py."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cp_volta import traffic
from cp_volta.attention import attend
from cp_volta.comm import counting
from cp_volta.group import init_cp_group
from cp_volta.layout import positions
from harness.cells import Task
from harness.rows import Result, Verdict
from probes import ranks
from probes.cp_axes import shared_note
from probes.cp_parity import BARS, CpParityAxes, whole
from probes.models.build import DTYPES

NAMES = ("out", "dq", "dk", "dv")


class OfRank(NamedTuple):
    """Out, dq, dk, dv of one rank on the host, what it sent, and its peak."""

    tensors: list[Tensor]
    forward_bytes: int
    backward_bytes: int
    peak_bytes: int


def run(axes: CpParityAxes, task: Task) -> Result:
    """Start the ranks, then judge what they found."""
    if axes.model:
        return whole.run(axes, task)
    found = ranks.result(_rank, axes.cp_size, (axes, task), axes=axes, task=task)
    if isinstance(found, Result):
        return found
    return _judged(axes, task, found)


def _judged(axes: CpParityAxes, task: Task, found: list[OfRank]) -> Result:
    want = reference(*inputs(axes, task.seed), causal=axes.causal)
    held = [
        positions(axes.seq, axes.cp_size // axes.ulysses, rank, axes.layout, ulysses=axes.ulysses)
        for rank in range(axes.cp_size)
    ]
    errors = {
        name: max(_error(one.tensors[i], want[i], at) for one, at in zip(found, held, strict=True))
        for i, name in enumerate(NAMES)
    }
    formula = [expected(axes, rank) for rank in range(axes.cp_size)]
    sent = [traffic.Traffic(forward=one.forward_bytes, backward=one.backward_bytes) for one in found]
    verdict, reason = judge(errors, BARS[axes.dtype], sent == formula)
    note = shared_note(axes, task.device)
    return Result(
        verdict=verdict,
        verdict_reason=reason,
        facts={
            **{f"{name}_error": error for name, error in errors.items()},
            "bar": BARS[axes.dtype],
            "bytes_forward": max(s.forward for s in sent),
            "bytes_forward_by_formula": max(f.forward for f in formula),
            "bytes_backward": max(s.backward for s in sent),
            "bytes_backward_by_formula": max(f.backward for f in formula),
            "busiest_rank_peak_bytes": max(one.peak_bytes for one in found) or None,
        },
        notes=(note,) if note else (),
    )


def judge(errors: dict[str, float], bar: float, bytes_right: bool) -> tuple[Verdict, str]:
    """The verdict on the errors by tensor, and why. A NaN is an error that no bar admits."""
    worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else float("inf"))
    if any(error != error for error in errors.values()):
        return "nonfinite", f"{worst} is not finite"
    if errors[worst] > bar:
        return "mismatch", f"{worst}: error {errors[worst]:.2e}, the bar is {bar:.1e}"
    if not bytes_right:
        return "mismatch", "the bytes sent are not those of the formula"
    return "ok", f"worst is {worst}: error {errors[worst]:.2e}, the bar is {bar:.1e}; bytes as by the formula"


def _error(got: Tensor, want: Tensor, at: Tensor) -> float:
    return float((got.double() - want[:, :, at]).abs().max() / want.abs().max())


def inputs(axes: CpParityAxes, seed: int) -> list[Tensor]:
    """q, k, v and the gradient of out, whole, in the axes' dtype: the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(axes.batch, heads, axes.seq, axes.head_dim, generator=generator).to(DTYPES[axes.dtype])
        for heads in (axes.heads, axes.kv_heads, axes.kv_heads, axes.heads)
    ]


def reference(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, *, causal: bool) -> list[Tensor]:
    """out, dq, dk, dv in float64, written out; one head at a time, for the memory of its scores."""
    group = q.shape[1] // k.shape[1]
    found = [torch.zeros(x.shape, dtype=torch.float64) for x in (q, q, k, v)]
    for head in range(q.shape[1]):
        parts = [
            x[:, i].double().requires_grad_() for x, i in ((q, head), (k, head // group), (v, head // group))
        ]
        scores = parts[0] @ parts[1].transpose(-1, -2) * q.shape[-1] ** -0.5
        if causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
        out = scores.softmax(-1) @ parts[2]
        dq, dk, dv = torch.autograd.grad(out, parts, dout[:, head].double())
        found[0][:, head], found[1][:, head] = out.detach(), dq
        found[2][:, head // group] += dk
        found[3][:, head // group] += dv
    return found


def expected(axes: CpParityAxes, rank: int) -> traffic.Traffic:
    """By the formulas."""
    return traffic.attention(
        batch=axes.batch,
        seq=axes.seq,
        dim=axes.head_dim,
        itemsize=DTYPES[axes.dtype].itemsize,
        query=axes.heads,
        kv=axes.kv_heads,
        ring_ranks=axes.cp_size // axes.ulysses,
        ulysses_ranks=axes.ulysses,
        rank=rank,
    )


def _rank(rank: int, axes: CpParityAxes, task: Task) -> OfRank:
    cp = init_cp_group(axes.cp_size, ulysses=axes.ulysses, layout=axes.layout, device_type=task.device)
    at = cp.positions(axes.seq)
    q, k, v, dout = (x[:, :, at].to(task.device) for x in inputs(axes, task.seed))
    for x in (q, k, v):
        x.requires_grad_()
    if task.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with counting() as forward:
        out = attend(q, k, v, cp, causal=axes.causal, kernel=axes.attention)
    with counting() as backward:
        grads = torch.autograd.grad(out, (q, k, v), dout)
    return OfRank(
        tensors=[x.detach().cpu() for x in (out, *grads)],
        forward_bytes=forward.bytes_sent,
        backward_bytes=backward.bytes_sent,
        peak_bytes=torch.cuda.max_memory_allocated() if task.device == "cuda" else 0,
    )
