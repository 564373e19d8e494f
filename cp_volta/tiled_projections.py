"""Queries, keys and values of an attention layer over tiles of the sequence, from one op.

RMSNorm (if asked), three products, Qwen3's norms of each head, rotary positions: what stands in memory for the whole
sequence is the input and q, k, v alone. Backward computes again what it needs, tile by tile.
Legend: B batch, S sequence, H hidden, A heads of one kind, D head dimension, T tokens of a tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cp_volta.linear import Grads, Linear, Products, pack, unpack
from cp_volta.matmul import check_tile, compute_dtype, tiles
from cp_volta.rows import rms_norm, rms_norm_backward
from cp_volta.tiled_ffn import adapter_dtype, empty_grads
from cp_volta.tiled_norm import DEFAULT_TILE
from tc_volta.autocast import without_autocast


def tiled_qkv(
    x: Tensor,
    query: Linear,
    key: Linear,
    value: Linear,
    cos: Tensor,
    sin: Tensor,
    *,
    norm_weight: Tensor | None = None,
    head_norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 1e-6,
    tile: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k with rotary positions, and v, of x [B, S, H]; each [B, A, S, D] over memory laid out [B, S, A, D].

    cos, sin: [1 or B, S, D], as transformers' rotary embedding gives them.
    norm_weight: of an RMSNorm of x, applied first. head_norms: of queries' and keys' heads [D], as in Qwen3.
    Returns in the compute dtype (under autocast transformers has q and k in float32 here, and casts them next).
    Errors: ValueError for shapes or dtypes that do not fit.
    """
    check_tile(tile, "tiled_qkv")
    if (
        x.dim() != 3
        or cos.shape != sin.shape
        or cos.shape[0] not in (1, x.shape[0])
        or cos.shape[1] != x.shape[1]
    ):
        raise ValueError(f"x {tuple(x.shape)} with cos {tuple(cos.shape)} and sin {tuple(sin.shape)}")
    linears = (query, key, value)
    tensors, kinds, scales = pack(linears)
    norms = [] if norm_weight is None else [norm_weight]
    norms += [] if head_norms is None else list(head_norms)
    letters = ("n" if norm_weight is not None else "") + ("h" if head_norms is not None else "")
    compute = compute_dtype(x, query.weight)
    made = torch.ops.cp_volta.tiled_qkv(
        x,
        cos,
        sin,
        [*norms, *tensors],
        f"{letters}|{kinds}",
        scales,
        eps,
        tile or DEFAULT_TILE,
        compute,
        adapter_dtype(x, linears, compute),
    )
    q, k, v = (each.transpose(1, 2) for each in made)
    return q, k, v


def rotate(x_TAD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Rotary positions; each half of the features turns with the other."""
    left, right = x_TAD.chunk(2, -1)
    return x_TAD * cos_TD[:, None] + torch.cat((-right, left), -1) * sin_TD[:, None]


def rotate_back(dy_TAD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """The transpose of `rotate`."""
    left, right = (dy_TAD * sin_TD[:, None]).chunk(2, -1)
    return dy_TAD * cos_TD[:, None] + torch.cat((right, -left), -1)


class _Qkv:
    """The tensors of a call, cast once, and the work on one tile of one sequence."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        kinds: str,
        scales: Sequence[float],
        eps: float,
        head_dim: int,
        compute: torch.dtype,
        adapter: torch.dtype,
    ) -> None:
        letters, _, rest = kinds.partition("|")
        left = list(tensors)
        self.norm = left.pop(0) if "n" in letters else None
        self.head_norms = (left.pop(0), left.pop(0), None) if "h" in letters else (None, None, None)
        self.parts = [Products(each, compute, adapter) for each in unpack(left, rest, scales)]
        self.eps, self.head_dim, self.compute = eps, head_dim, compute

    def normed(self, x_TH: Tensor) -> Tensor:
        n_TH = x_TH if self.norm is None else rms_norm(x_TH, self.norm, self.eps)
        return n_TH.to(self.compute)

    def forward(self, x_TH: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> list[Tensor]:
        n_TH = self.normed(x_TH)
        made = []
        for i, (part, norm) in enumerate(zip(self.parts, self.head_norms, strict=True)):
            y_TAD = part.forward(n_TH).view(len(n_TH), -1, self.head_dim)
            y_TAD = y_TAD if norm is None else rms_norm(y_TAD, norm, self.eps)
            made.append(y_TAD if i == 2 else rotate(y_TAD, cos_TD, sin_TD))
        return made

    def backward(
        self, dys: Sequence[Tensor], x_TH: Tensor, cos_TD: Tensor, sin_TD: Tensor, grads: Grads
    ) -> Tensor:
        n_TH = self.normed(x_TH)
        dn_TH: Tensor | None = None
        for i, (part, norm, dy_TAD) in enumerate(zip(self.parts, self.head_norms, dys, strict=True)):
            dy = dy_TAD if i == 2 else rotate_back(dy_TAD, cos_TD, sin_TD)
            if norm is not None:
                y_TAD = part.forward(n_TH).view(dy.shape)
                dy, products = rms_norm_backward(dy, y_TAD, norm, self.eps)
                grads.rows(norm, products)
            dy = dy.to(self.compute).flatten(1)
            part.weight_grads(dy, n_TH, grads)
            dn_TH = part.input_grad(dy, dn_TH)
        assert dn_TH is not None
        if self.norm is None:
            return dn_TH
        dx_TH, products = rms_norm_backward(dn_TH, x_TH, self.norm, self.eps)
        grads.rows(self.norm, products)
        return dx_TH


def _outputs(
    x: Tensor, cos: Tensor, tensors: Sequence[Tensor], kinds: str, compute: torch.dtype
) -> list[Tensor]:
    letters, _, rest = kinds.partition("|")
    linears = unpack(tensors["n" in letters :][2 * ("h" in letters) :], rest, [1.0] * 3)
    head = cos.shape[-1]
    return [
        x.new_empty((*x.shape[:2], each.weight.shape[0] // head, head), dtype=compute) for each in linears
    ]


@torch.library.custom_op("cp_volta::tiled_qkv", mutates_args=())
def _forward(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    tensors: Sequence[Tensor],
    kinds: str,
    scales: Sequence[float],
    eps: float,
    tile: int,
    compute: torch.dtype,
    adapter: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = made = _outputs(x, cos, tensors, kinds, compute)
    with without_autocast(x.device.type):
        work = _Qkv(tensors, kinds, scales, eps, cos.shape[-1], compute, adapter)
        for b in range(x.shape[0]):
            at = b % cos.shape[0]
            for part in tiles(x.shape[1], tile):
                for y, y_TAD in zip(
                    made, work.forward(x[b, part], cos[at, part], sin[at, part]), strict=True
                ):
                    y[b, part] = y_TAD
    return q, k, v


@_forward.register_fake
def _(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    tensors: Sequence[Tensor],
    kinds: str,
    scales: Sequence[float],
    eps: float,
    tile: int,
    compute: torch.dtype,
    adapter: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = _outputs(x, cos, tensors, kinds, compute)
    return q, k, v


@torch.library.custom_op("cp_volta::tiled_qkv_backward", mutates_args=())
def _grads(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    tensors: Sequence[Tensor],
    kinds: str,
    scales: Sequence[float],
    eps: float,
    tile: int,
    compute: torch.dtype,
    adapter: torch.dtype,
    needed: Sequence[bool],
) -> tuple[Tensor, list[Tensor]]:
    dx = x.new_empty(x.shape)
    work = _Qkv(tensors, kinds, scales, eps, cos.shape[-1], compute, adapter)
    grads = Grads(tensors, needed, x.shape[0] * -(-x.shape[1] // tile))
    for b in range(x.shape[0]):
        at = b % cos.shape[0]
        for part in tiles(x.shape[1], tile):
            dys = (dq[b, part], dk[b, part], dv[b, part])
            dx[b, part] = work.backward(dys, x[b, part], cos[at, part], sin[at, part], grads)
    return dx, grads.finish()


@_grads.register_fake
def _(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    tensors: Sequence[Tensor],
    kinds: str,
    scales: Sequence[float],
    eps: float,
    tile: int,
    compute: torch.dtype,
    adapter: torch.dtype,
    needed: Sequence[bool],
) -> tuple[Tensor, list[Tensor]]:
    return x.new_empty(x.shape), empty_grads(tensors, needed)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, cos, sin, tensors, *ctx.rest = inputs
    if cos.requires_grad or sin.requires_grad:
        raise ValueError("a gradient of cos or sin is not computed; detach them")
    ctx.needed = [bool(t.requires_grad) for t in tensors]
    ctx.save_for_backward(x, cos, sin, *tensors)


def _backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Any, ...]:
    x, cos, sin, *tensors = ctx.saved_tensors
    dx, found = torch.ops.cp_volta.tiled_qkv_backward(dq, dk, dv, x, cos, sin, tensors, *ctx.rest, ctx.needed)
    grads = [g if need else None for g, need in zip(found, ctx.needed, strict=True)]
    return dx, None, None, grads, *(None,) * len(ctx.rest)


_forward.register_autograd(_backward, setup_context=_setup)
