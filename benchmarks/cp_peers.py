"""Attention over several ranks, side by side in one run: ours, torch's context_parallel, and K/V gathered whole.

    python -m benchmarks.cp_peers [--ranks 4] [--seq 8192] [--kv-heads 2]

Forward and backward of one causal layer, float32, gloo on this CPU, each way in processes of its own. Error: the worst
of out, dq, dk, dv against float64, max|difference| / max|reference|. Sent: what went over the loopback interface, by
the kernel's counter, over the ranks; the same for all, whoever counts how. Memory: growth of a rank's resident peak.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel

from cp_volta import init_cp_group
from cp_volta.attention import attend
from probes import ranks
from probes.cp_parity import CpParityAxes
from probes.cp_parity.work import inputs, reference
from probes.step_memory import host_peak_bytes, reset_host_peak

Call = Callable[[Tensor, Tensor, Tensor], Tensor]
Way = tuple[Call, Tensor, Callable[[], contextlib.AbstractContextManager[None]]]


class Found(NamedTuple):
    """Of one rank."""

    seconds: float
    sent_bytes: float  # of all ranks, one step
    memory_bytes: int
    at: Tensor
    tensors: list[Tensor]


def _ours(ulysses: bool, layout: str) -> Callable[[int], Way]:
    def make(seq: int) -> Way:
        size = dist.get_world_size()
        cp = init_cp_group(size, ulysses=size if ulysses else 1, layout=layout)
        return lambda q, k, v: attend(q, k, v, cp), cp.positions(seq), contextlib.nullcontext

    return make


class _Whole(torch.autograd.Function):
    """All ranks' keys; back comes the sum of all ranks' gradients of mine. [B, G, s, D] -> [B, G, S, D]."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor) -> Tensor:
        rows = mine.movedim(2, 0).contiguous()
        whole = rows.new_empty((rows.shape[0] * dist.get_world_size(), *rows.shape[1:]))
        dist.all_gather_into_tensor(whole, rows)
        return whole.movedim(0, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        rows = grads[0].movedim(2, 0).contiguous()
        mine = rows.new_empty((rows.shape[0] // dist.get_world_size(), *rows.shape[1:]))
        dist.reduce_scatter_tensor(mine, rows)
        return mine.movedim(0, 2)


def _gathered(seq: int) -> Way:
    """Every rank gathers all keys and values, and its gradient is reduced back to who holds them."""
    at = torch.arange(seq).chunk(dist.get_world_size())[dist.get_rank()]
    mask = at[:, None] >= torch.arange(seq)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            q, _Whole.apply(k), _Whole.apply(v), attn_mask=mask, enable_gqa=True
        )

    return call, at, contextlib.nullcontext


def _torchs(seq: int) -> Way:
    """As its documentation has it: forward and backward within the context, sdpa is then the ring's."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    @contextlib.contextmanager
    def within() -> Iterator[None]:
        sharded = torch.zeros(seq)  # it wants something to shard; q, k and v are shards already
        with context_parallel(mesh, buffers=[sharded], buffer_seq_dims=[0]):
            yield

    chunks = torch.arange(seq).chunk(2 * size)  # head and tail, its default balance
    return call, torch.cat((chunks[rank], chunks[2 * size - 1 - rank])), within


WAYS = {
    "ours: ring, zigzag": _ours(False, "zigzag"),
    "ours: ring, contiguous": _ours(False, "contiguous"),
    "ours: ulysses": _ours(True, "contiguous"),
    "K/V gathered": _gathered,
    "torch context_parallel": _torchs,
}


def _rank(rank: int, way: str, axes: CpParityAxes, steps: int) -> Found:
    torch.set_num_threads(1)
    call, at, within = WAYS[way](axes.seq)
    *qkv, dout = (x[:, :, at] for x in inputs(axes, 0))
    for x in qkv:
        x.requires_grad_()

    def step() -> list[Tensor]:
        with within():
            out = call(*qkv)
            return [out.detach(), *torch.autograd.grad(out, qkv, dout)]

    dist.barrier()
    reset_host_peak()
    before = host_peak_bytes() or 0
    tensors = step()
    dist.barrier()
    sent, seconds = _loopback_bytes(), []
    for _ in range(steps):
        dist.barrier()
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    dist.barrier()
    travelled = (_loopback_bytes() - sent) / steps
    return Found(statistics.median(seconds), travelled, (host_peak_bytes() or 0) - before, at, tensors)


def _loopback_bytes() -> int:
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "lo":
            return int(counts.split()[8])
    return 0


def _line(way: str, found: list[Found] | ranks.Failure, want: list[Tensor]) -> tuple[str, ...]:
    if isinstance(found, ranks.Failure):
        return way, "does not run", "", "", found.error.splitlines()[0][:150]
    error = max(
        float((got.double() - true[:, :, one.at]).abs().max() / true.abs().max())
        for one in found
        for got, true in zip(one.tensors, want, strict=True)
    )
    return (
        way,
        f"{max(one.seconds for one in found):.3f}",
        f"{max(one.sent_bytes for one in found) / len(found) / 2**20:.1f}",
        f"{max(one.memory_bytes for one in found) / 2**20:.0f}",
        f"{error:.1e}" + ("" if error < 2e-6 else "  WRONG"),
    )


def main(
    size: Annotated[int, typer.Option("--ranks", min=2)] = 4,
    seq: Annotated[int, typer.Option()] = 8192,
    kv_heads: Annotated[int, typer.Option()] = 2,
    steps: Annotated[int, typer.Option(min=1)] = 5,
) -> None:
    """Print one line per way."""
    axes = CpParityAxes(cp_size=size, seq=seq, kv_heads=kv_heads)
    want = reference(*inputs(axes, 0), causal=True)
    table = Table("way", "s", "MiB sent by a rank", "MiB more at peak", "error")
    for way in WAYS:
        with tempfile.TemporaryDirectory() as folder:
            args = (way, axes, steps)
            crew = ranks.Crew(
                work=_rank, size=size, args=args, folder=Path(folder), backend="gloo", timeout_s=300
            )
            found = ranks.run(crew)
        table.add_row(*_line(way, found, want))
    print(f"12 query and {kv_heads} key/value heads of 64, {seq:,} tokens on {size} ranks of one CPU")
    Console(width=130).print(table)


if __name__ == "__main__":
    typer.run(main)
