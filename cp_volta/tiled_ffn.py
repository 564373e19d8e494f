"""A gated MLP over tiles of the sequence: [tokens, intermediate] never exists, and nothing is saved but the input.

down(act(gate(n)) * up(n)), where n is x or, with a norm, RMSNorm(x). Backward computes gate and up again, tile by
tile, which inside a checkpointed layer is work that the checkpoint would do anyway.
Legend: N tokens, H hidden, M intermediate, T tokens of a tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cp_volta.activation import check_activation
from cp_volta.linear import Grads, Linear, Products, pack, unpack
from cp_volta.matmul import check_tile, compute_dtype, tiles
from cp_volta.rows import gate_, gate_backward_, rms_norm, rms_norm_backward
from tc_volta.autocast import without_autocast

_TILE_BYTES = 768 << 20
_BUFFERS = 5  # [T, M] at once in backward


def default_tile(mlp: int, element_bytes: int) -> int:
    """Tokens of a tile whose five [T, M] of backward take about 768 MiB; 1,024 to 8,192."""
    rows = _TILE_BYTES // (_BUFFERS * mlp * element_bytes)
    return max(1024, min(8192, rows // 1024 * 1024))


def tiled_mlp(
    x: Tensor,
    gate: Linear,
    up: Linear,
    down: Linear,
    *,
    activation: str = "silu",
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    tile: int | None = None,
    unused: bool = False,
) -> Tensor:
    """The MLP of x [..., H], `tile` tokens at a time (None: `default_tile`); [..., H] in the compute dtype.

    norm_weight: of an RMSNorm to apply first, inside the tile.
    unused: nobody will look at the result, only at the gradient (a checkpoint's second forward): nothing is
            computed, and what comes back are zeros.
    Errors: ValueError for dtypes that do not fit, or an activation that is not known.
    """
    check_tile(tile, "tiled_mlp")
    check_activation(activation)
    linears = (gate, up, down)
    tensors, kinds, scales = pack(linears)
    if norm_weight is not None:
        tensors = [norm_weight, *tensors]
        kinds = "n" + kinds
    compute = compute_dtype(x, gate.weight)
    adapter = adapter_dtype(x, linears, compute)
    flat = x.reshape(-1, x.shape[-1])
    y: Tensor = torch.ops.cp_volta.tiled_mlp(
        flat,
        tensors,
        kinds,
        scales,
        activation,
        eps,
        tile or default_tile(gate.weight.shape[0], compute.itemsize),
        compute,
        adapter,
        unused,
    )
    return y.view(*x.shape[:-1], y.shape[-1])


def adapter_dtype(x: Tensor, linears: Sequence[Linear], compute: torch.dtype) -> torch.dtype:
    """Adapters are computed in their own dtype, as peft does, unless autocast says otherwise."""
    device = x.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        return compute
    return next((each.down.dtype for each in linears if each.down is not None), compute)


class _Mlp:
    """The tensors of a call, cast once, and the work on one tile."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        kinds: str,
        scales: Sequence[float],
        activation: str,
        eps: float,
        compute: torch.dtype,
        adapter: torch.dtype,
    ) -> None:
        self.norm = tensors[0] if kinds.startswith("n") else None
        rest = tensors[1:] if self.norm is not None else tensors
        linears = unpack(rest, kinds.removeprefix("n"), scales)
        self.gate, self.up, self.down = (Products(each, compute, adapter) for each in linears)
        self.activation, self.eps, self.compute = activation, eps, compute

    def normed(self, x_TH: Tensor) -> Tensor:
        n_TH = x_TH if self.norm is None else rms_norm(x_TH, self.norm, self.eps)
        return n_TH.to(self.compute)

    def forward(self, x_TH: Tensor) -> Tensor:
        n_TH = self.normed(x_TH)
        return self.down.forward(gate_(self.gate.forward(n_TH), self.up.forward(n_TH), self.activation))

    def backward(self, dy_TH: Tensor, x_TH: Tensor, grads: Grads) -> Tensor:
        n_TH, dy_TH = self.normed(x_TH), dy_TH.to(self.compute)
        dp_TM = self.down.input_grad(dy_TH)
        dg_TM, du_TM, p_TM = gate_backward_(
            self.gate.forward(n_TH), self.up.forward(n_TH), dp_TM, self.activation
        )
        self.down.weight_grads(dy_TH, p_TM, grads)
        self.gate.weight_grads(dg_TM, n_TH, grads)
        self.up.weight_grads(du_TM, n_TH, grads)
        dn_TH = self.up.input_grad(du_TM, self.gate.input_grad(dg_TM))
        if self.norm is None:
            return dn_TH
        dx_TH, products = rms_norm_backward(dn_TH, x_TH, self.norm, self.eps)
        grads.rows(self.norm, products)
        return dx_TH


@torch.library.custom_op("cp_volta::tiled_mlp", mutates_args=())
def _forward(
    x: Tensor,
    tensors: Sequence[Tensor],
    kinds: str,
    scales: Sequence[float],
    activation: str,
    eps: float,
    tile: int,
    compute: torch.dtype,
    adapter: torch.dtype,
    unused: bool,
) -> Tensor:
    if unused:
        return x.new_zeros((), dtype=compute).expand(x.shape)
    y = x.new_empty(x.shape, dtype=compute)
    with without_autocast(x.device.type):
        mlp = _Mlp(tensors, kinds, scales, activation, eps, compute, adapter)
        for part in tiles(x.shape[0], tile):
            y[part] = mlp.forward(x[part])
    return y


@_forward.register_fake
def _(
    x: Tensor,
    tensors: Sequence[Tensor],
    kinds: str,
    scales: Sequence[float],
    activation: str,
    eps: float,
    tile: int,
    compute: torch.dtype,
    adapter: torch.dtype,
    unused: bool,
) -> Tensor:
    return x.new_empty(x.shape, dtype=compute)


@torch.library.custom_op("cp_volta::tiled_mlp_backward", mutates_args=())
def _grads(
    dy: Tensor,
    x: Tensor,
    tensors: Sequence[Tensor],
    kinds: str,
    scales: Sequence[float],
    activation: str,
    eps: float,
    tile: int,
    compute: torch.dtype,
    adapter: torch.dtype,
    needed: Sequence[bool],
) -> tuple[Tensor, list[Tensor]]:
    dx = x.new_empty(x.shape)
    mlp = _Mlp(tensors, kinds, scales, activation, eps, compute, adapter)
    grads = Grads(tensors, needed, -(-x.shape[0] // tile))
    for part in tiles(x.shape[0], tile):
        dx[part] = mlp.backward(dy[part], x[part], grads)
    return dx, grads.finish()


@_grads.register_fake
def _(
    dy: Tensor,
    x: Tensor,
    tensors: Sequence[Tensor],
    kinds: str,
    scales: Sequence[float],
    activation: str,
    eps: float,
    tile: int,
    compute: torch.dtype,
    adapter: torch.dtype,
    needed: Sequence[bool],
) -> tuple[Tensor, list[Tensor]]:
    return x.new_empty(x.shape), empty_grads(tensors, needed)


def empty_grads(tensors: Sequence[Tensor], needed: Sequence[bool]) -> list[Tensor]:
    """What `Grads.finish` returns, without the values: for an op's fake."""
    return [t.new_empty(t.shape if need else 0) for t, need in zip(tensors, needed, strict=True)]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, tensors, *ctx.rest, _unused = inputs
    ctx.needed = [bool(t.requires_grad) for t in tensors]
    ctx.save_for_backward(x, *tensors)


def _backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x, *tensors = ctx.saved_tensors
    dx, found = torch.ops.cp_volta.tiled_mlp_backward(dy, x, tensors, *ctx.rest, ctx.needed)
    grads = [g if need else None for g, need in zip(found, ctx.needed, strict=True)]
    return dx, grads, *(None,) * (len(ctx.rest) + 1)


_forward.register_autograd(_backward, setup_context=_setup)
