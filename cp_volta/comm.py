"""Communication between the ranks of a group: every byte goes through here, and is counted.

A group is named by its string, since an op that torch.compile keeps whole takes no ProcessGroup.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass
class Tally:
    """Of one kind of collective on this rank."""

    calls: int = 0
    bytes_sent: int = 0
    seconds: float = 0.0  # the host's, in starting and waiting; kernels on a GPU run on after it


@dataclass(eq=False)  # two of the same figures are still two
class Ledger:
    """What this rank sent while `counting`: by collective, "rotate" and "all_to_all"."""

    tallies: dict[str, Tally] = field(default_factory=dict)

    @property
    def bytes_sent(self) -> int:
        """Over all collectives."""
        return sum(tally.bytes_sent for tally in self.tallies.values())


_open: list[Ledger] = []


@contextlib.contextmanager
def counting() -> Iterator[Ledger]:
    """A ledger of what this process sends until the block ends; blocks may nest, and each counts."""
    ledger = Ledger()
    _open.append(ledger)
    try:
        yield ledger
    finally:
        _open.remove(ledger)


def _count(kind: str, sent: int, seconds: float, calls: int = 1) -> None:
    for ledger in _open:
        tally = ledger.tallies.setdefault(kind, Tally())
        tally.calls += calls
        tally.bytes_sent += sent
        tally.seconds += seconds


def group_of(name: str) -> dist.ProcessGroup:
    """The process group of a name. Its only way back is private to torch; tests/test_cp_comm.py holds it."""
    return cast(dist.ProcessGroup, cast(Any, dist.distributed_c10d)._resolve_process_group(name))


def check_device(x: Tensor, group: dist.ProcessGroup) -> None:
    """Raise ValueError, on every rank alike, for tensors that the group's backend can't move."""
    backend = dist.get_backend(group)
    if backend == "nccl" and not x.is_cuda:
        raise ValueError(f"the group's backend is nccl, which moves CUDA tensors; got one on {x.device}")


class Moving:
    """A tensor under way from the previous rank. What is sent must not be written to until `wait`."""

    def __init__(self, sent: Tensor, received: Tensor, works: list[Any]) -> None:
        self._sent, self._received, self._works = sent, received, works

    def wait(self) -> Tensor:
        """The tensor that arrived; on CUDA the current stream waits, not the host."""
        began = time.perf_counter()
        for work in self._works:
            work.wait()
        _count("rotate", 0, time.perf_counter() - began, calls=0)
        return self._received


def rotate(x: Tensor, group: dist.ProcessGroup) -> Moving:
    """Start sending x to the next rank and receiving its like from the previous one.

    Both in one batch: a lone send before its receive can hang a ring. gloo moves CUDA tensors in all_to_all_single
    alone, so there a rotation is one of those with all but one split empty; the bytes sent are the same.
    """
    began = time.perf_counter()
    rank, size = group.rank(), group.size()
    x = x.contiguous()
    received = torch.empty_like(x)
    after, before = (rank + 1) % size, (rank - 1) % size
    if x.is_cuda and dist.get_backend(group) == "gloo":
        give, take = [0] * size, [0] * size
        give[after] = take[before] = x.numel()
        work = dist.all_to_all_single(received.view(-1), x.view(-1), take, give, group=group, async_op=True)
        works = [work]
    else:
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, x, group=group, group_peer=after),
                dist.P2POp(dist.irecv, received, group=group, group_peer=before),
            ]
        )
    _count("rotate", x.numel() * x.element_size(), time.perf_counter() - began)
    return Moving(x, received, works)


def all_to_all(x: Tensor, give: list[int], take: list[int], group: dist.ProcessGroup) -> Tensor:
    """Rows of x, give[p] of them to rank p in order of ranks, for take[p] rows from each. Differentiable.

    x [sum(give), ...] -> [sum(take), ...]. torch.compile keeps it whole; its gradient is the same exchange backward.
    """
    check_device(x, group)
    return cast(Tensor, torch.ops.cp_volta.all_to_all(x, give, take, group.group_name))


@torch.library.custom_op("cp_volta::all_to_all", mutates_args=())
def _all_to_all(x: Tensor, give: list[int], take: list[int], group: str) -> Tensor:
    began = time.perf_counter()
    ranks = group_of(group)
    x = x.contiguous()
    out = x.new_empty((sum(take), *x.shape[1:]))
    dist.all_to_all_single(out, x, take, give, group=ranks)
    row = x.numel() // max(x.shape[0], 1) * x.element_size()
    _count("all_to_all", row * (sum(give) - give[ranks.rank()]), time.perf_counter() - began)
    return out


@_all_to_all.register_fake
def _(x: Tensor, give: list[int], take: list[int], group: str) -> Tensor:
    return x.new_empty((sum(take), *x.shape[1:]))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.give, ctx.take, ctx.group = inputs[1:]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return torch.ops.cp_volta.all_to_all(grad, ctx.take, ctx.give, ctx.group), None, None, None


_all_to_all.register_autograd(_backward, setup_context=_setup)
