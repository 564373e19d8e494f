"""cp_volta::ring_attention: exact attention over keys that go round a ring of ranks, one opaque op each way.

Forward: K and V rotate, R-1 hops; every rank merges (out, lse) of the blocks that its queries may see. Backward: K
and V rotate again, and with them dK and dV in float32, which set out at the first rank that is not their home and
get the home's own share last: R-1 hops instead of R. Key/value heads travel compact; a kernel that needs them
expanded does it locally. Sources: Liu et al., arXiv 2310.01889; the block formulas of FlashAttention-2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cp_volta.comm import Moving, group_of, rotate
from cp_volta.layout import Block, block, positions
from cp_volta.matmul import HALF
from cp_volta.merge import Partial
from tc_volta.op import flash_attn, flash_attn_backward
from tc_volta.request import lse_dtype


@dataclass(frozen=True)
class _Ring:
    """One rank's view: which blocks it computes, under which mask."""

    group: dist.ProcessGroup
    causal: bool
    layout: str
    window: int
    documents: Tensor | None  # [B, S], of the whole sequence in its order

    def source(self, hop: int) -> int:
        return (self.group.rank() - hop) % self.group.size()

    def block(self, hop: int, shard: int) -> Block | None:
        return block(self.group.rank(), self.source(hop), shard, causal=self.causal, layout=self.layout)

    def mask(self, part: Block, hop: int, shard: int, device: torch.device) -> Tensor | None:
        """[B or 1, 1, S, T] bool, True: may look; None where the block's own causality says all."""
        if self.documents is None and not self.window:
            return None
        size = self.group.size()
        at = [
            positions(shard * size, size, rank, self.layout) for rank in (self.group.rank(), self.source(hop))
        ]
        query, key = at[0][part.queries].to(device), at[1][part.keys].to(device)
        behind = query[:, None] - key[None, :]
        seen = behind >= 0 if self.causal else torch.ones_like(behind, dtype=torch.bool)
        if self.window:
            seen = seen & (behind < self.window)
        seen = seen[None, None]
        if self.documents is None:
            return seen
        documents = self.documents.to(device)
        same = documents[:, query][:, :, None] == documents[:, key][:, None, :]
        return seen & same[:, None]


def _call(
    ring: _Ring, part: Block, hop: int, shard: int, device: torch.device, scale: float, kernel: str
) -> dict[str, Any]:
    mask = ring.mask(part, hop, shard, device)
    return {"attn_mask": mask, "causal": part.causal and mask is None, "scale": scale, "kernel": kernel}


@torch.library.custom_op("cp_volta::ring_attention", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    causal: bool,
    scale: float,
    window: int,
    layout: str,
    kernel: str,
    group: str,
) -> tuple[Tensor, Tensor]:
    ring = _Ring(group_of(group), causal, layout, window, documents)
    shard, hops = q.shape[2], ring.group.size()
    total = Partial(q, lse_dtype(q.dtype))
    kv = torch.stack((k, v))
    for hop in range(hops):
        moving = rotate(kv, ring.group) if hop < hops - 1 else None  # under way while this block computes
        part = ring.block(hop, shard)
        if part is not None:
            out, lse = flash_attn(
                q[:, :, part.queries],
                *kv[:, :, :, part.keys],
                return_lse=True,
                **_call(ring, part, hop, shard, q.device, scale, kernel),
            )
            total.add(part.queries, out, lse)
        if moving is not None:
            kv = moving.wait()
    return total.out.to(q.dtype), total.lse


@_forward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    causal: bool,
    scale: float,
    window: int,
    layout: str,
    kernel: str,
    group: str,
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=lse_dtype(q.dtype))


def _wide(x: Tensor) -> Tensor:
    """A block in float32 on a CPU, whose half kernels round each partial product: 1.9e-3 off in fp16, not 5e-4."""
    return x.float() if x.device.type == "cpu" and x.dtype in HALF else x


@torch.library.custom_op("cp_volta::ring_attention_backward", mutates_args=())
def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    documents: Tensor | None,
    causal: bool,
    scale: float,
    window: int,
    layout: str,
    kernel: str,
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:
    ring = _Ring(group_of(group), causal, layout, window, documents)
    shard, hops = q.shape[2], ring.group.size()
    dq = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
    kv, home = torch.stack((k, v)), torch.empty(0)
    dkv: Moving | None = None
    for hop in range(hops):
        moving = rotate(kv, ring.group) if hop < hops - 1 else None
        share = torch.zeros(kv.shape, dtype=lse.dtype, device=q.device)
        part = ring.block(hop, shard)
        if part is not None:
            grads = flash_attn_backward(
                *(_wide(x[:, :, part.queries]) for x in (dout, q)),
                *_wide(kv[:, :, :, part.keys]),
                *(_wide(x[:, :, part.queries]) for x in (out, lse)),
                **_call(ring, part, hop, shard, q.device, scale, kernel),
            )
            dq[:, :, part.queries] += grads[0]
            share[0, :, :, part.keys], share[1, :, :, part.keys] = grads[1:]
        if hop == 0:
            home = share
        else:
            dkv = rotate(share if dkv is None else share.add_(dkv.wait()), ring.group)
        if moving is not None:
            kv = moving.wait()
    dk, dv = home if dkv is None else home.add_(dkv.wait())
    return (
        dq.to(q.dtype),
        dk.to(k.dtype, copy=True),
        dv.to(v.dtype, copy=True),
    )  # an op's results share no memory


@_backward.register_fake
def _(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    documents: Tensor | None,
    causal: bool,
    scale: float,
    window: int,
    layout: str,
    kernel: str,
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, documents, *ctx.rest = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, *output, documents)


def _autograd(ctx: Any, dout: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, documents = ctx.saved_tensors
    grads = torch.ops.cp_volta.ring_attention_backward(dout, q, k, v, out, lse, documents, *ctx.rest)
    return (*grads, *(None,) * 7)


_forward.register_autograd(_autograd, setup_context=_setup)
