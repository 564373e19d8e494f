"""One collective on N ranks: small whole numbers, so that every dtype holds them exactly, then the clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cp_volta.comm import all_to_all, rotate
from harness import stats
from harness.cells import Measure, Task
from harness.rows import Result
from probes import ranks
from probes.collectives import CollectiveAxes
from probes.cp_axes import sharing_note

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_PRIME = 13  # values stay below 13 x ranks: exact in bfloat16 up to 19 ranks


class OfRank(NamedTuple):
    """What one rank found."""

    wrong: int  # elements
    first_wrong: str
    seconds: list[float]
    elements: int
    sent_bytes: int


def run(axes: CollectiveAxes, task: Task) -> Result:
    """Start the ranks; right only where every element is, on every rank."""
    found = ranks.result(_rank, axes.cp_size, (axes, task), axes=axes, task=task)
    if isinstance(found, Result):
        return found
    wrong = sum(one.wrong for one in found)
    slowest = [max(times) for times in zip(*(one.seconds for one in found), strict=True)]
    median = stats.median(slowest) or 0.0
    gb_s = max(one.sent_bytes for one in found) / median / 1e9 if median else None
    speed = f"{gb_s:.2f} GB/s sent by each rank, {median * 1e3:.2f} ms" if gb_s else "not timed"
    if wrong:
        where = next(f"rank {rank}: {one.first_wrong}" for rank, one in enumerate(found) if one.wrong)
        verdict_reason = f"{wrong:,} elements are wrong; {where}"
    else:
        verdict_reason = f"every element is right; {speed}"
    note = sharing_note(axes.backend, task.device, axes.cp_size)
    return Result(
        verdict="mismatch" if wrong else "ok",
        verdict_reason=verdict_reason,
        facts={
            "sent_bytes": max(one.sent_bytes for one in found),
            "median_s": median,
            "fastest_s": min(slowest),
            "slowest_s": max(slowest),
            "gb_s_sent_by_each_rank": gb_s,
            "elements": found[0].elements,
        },
        notes=(note,) if note else (),
    )


def _rank(rank: int, axes: CollectiveAxes, task: Task) -> OfRank:
    size = axes.cp_size
    each = max(1, int(axes.mib * 2**20) // _DTYPES[axes.dtype].itemsize // size)
    x = values(rank, each * size, task.device, _DTYPES[axes.dtype])
    call = CALLS[axes.kind]
    got, want = call(x.clone(), rank, size), expected(axes.kind, rank, size, each, x)
    wrong = got.ne(want)
    at = int(wrong.flatten().int().argmax())
    first = f"element {at:,} is {got.flatten()[at].item():g}, not {want.flatten()[at].item():g}"
    sent = {"rotate": 1.0, "all_reduce": 2 * (size - 1) / size}.get(axes.kind, (size - 1) / size)
    return OfRank(
        wrong=int(wrong.sum()),
        first_wrong=first,
        seconds=_time(lambda: call(x, rank, size), task.measure, task.device),
        elements=x.numel(),
        sent_bytes=int(sent * x.numel() * x.element_size()),
    )


def values(rank: int, count: int, device: str, dtype: torch.dtype) -> Tensor:
    """[count] whole numbers below 13 that differ from rank to rank."""
    return ((torch.arange(count, device=device) + 5 * rank) % _PRIME).to(dtype)


def expected(kind: str, rank: int, size: int, each: int, x: Tensor) -> Tensor:
    """By arithmetic, without a collective, what this rank must hold afterwards."""

    def of(source: int) -> Tensor:
        return values(source, each * size, x.device.type, x.dtype)

    mine = slice(rank * each, (rank + 1) * each)
    match kind:
        case "rotate":
            return of((rank - 1) % size)
        case "all_to_all":
            return torch.cat([of(p)[mine] for p in range(size)])
        case "all_gather":
            return torch.cat([of(p)[:each] for p in range(size)])
        case "reduce_scatter":
            return torch.stack([of(p)[mine] for p in range(size)]).sum(0)
    return torch.stack([of(p) for p in range(size)]).sum(0)


def _rotate(x: Tensor, rank: int, size: int) -> Tensor:
    assert dist.group.WORLD is not None
    return rotate(x, dist.group.WORLD).wait()


def _all_to_all(x: Tensor, rank: int, size: int) -> Tensor:
    assert dist.group.WORLD is not None
    split = [x.numel() // size] * size
    return all_to_all(x, split, split, dist.group.WORLD)


def _all_reduce(x: Tensor, rank: int, size: int) -> Tensor:
    out = x.clone()  # in place it would grow from call to call
    dist.all_reduce(out)
    return out


def _all_gather(x: Tensor, rank: int, size: int) -> Tensor:
    out = torch.empty_like(x)
    dist.all_gather_into_tensor(out, x[: x.numel() // size].contiguous())
    return out


def _reduce_scatter(x: Tensor, rank: int, size: int) -> Tensor:
    out = x.new_empty(x.numel() // size)
    dist.reduce_scatter_tensor(out, x)
    return out


CALLS: dict[str, Callable[[Tensor, int, int], Tensor]] = {
    "rotate": _rotate,
    "all_to_all": _all_to_all,
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
}


def _time(call: Callable[[], object], measure: Measure, device: str) -> list[float]:
    """Seconds of each timed call, from all ranks ready to the result there."""
    seconds = []
    for number in range(measure.warmup_steps + measure.steps):
        dist.barrier()
        began = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        if number >= measure.warmup_steps:
            seconds.append(time.perf_counter() - began)
    return seconds
