"""RMSNorm over tiles of the sequence: no float32 copy of the whole, and nothing saved but the input.

Legend: N tokens, H features, T tokens of a tile.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cp_volta.matmul import check_tile, sum_dtype, tiles
from cp_volta.rows import rms_norm, rms_norm_backward

DEFAULT_TILE = 8192


def tiled_rms_norm(x: Tensor, weight: Tensor, eps: float, *, tile: int | None = None) -> Tensor:
    """RMSNorm of x [..., H] by weight [H], `tile` rows at a time (None: 8,192).

    Returns [..., H] in the dtype that transformers' norm returns. Errors: ValueError where shapes do not fit.
    """
    check_tile(tile, "tiled_rms_norm")
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"a norm's weight {tuple(weight.shape)} for features {tuple(x.shape)}")
    flat = x.reshape(-1, x.shape[-1])
    y: Tensor = torch.ops.cp_volta.tiled_rms_norm(flat, weight, eps, tile or DEFAULT_TILE)
    return y.view(x.shape)


@torch.library.custom_op("cp_volta::tiled_rms_norm", mutates_args=())
def _forward(x: Tensor, weight: Tensor, eps: float, tile: int) -> Tensor:
    y = _like(x, weight)
    for part in tiles(x.shape[0], tile):
        y[part] = rms_norm(x[part], weight, eps)
    return y


@_forward.register_fake
def _(x: Tensor, weight: Tensor, eps: float, tile: int) -> Tensor:
    return _like(x, weight)


def _like(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype))


@torch.library.custom_op("cp_volta::tiled_rms_norm_backward", mutates_args=())
def _grads(dy: Tensor, x: Tensor, weight: Tensor, eps: float, tile: int) -> tuple[Tensor, Tensor]:
    dx = x.new_empty(x.shape)
    total = weight.new_zeros(weight.shape, dtype=sum_dtype(x.dtype))
    for part in tiles(x.shape[0], tile):
        dx[part], products = rms_norm_backward(dy[part], x[part], weight, eps)
        total += products.sum(0)
    return dx, total.to(weight.dtype)


@_grads.register_fake
def _(dy: Tensor, x: Tensor, weight: Tensor, eps: float, tile: int) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, ctx.eps, ctx.tile = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    dx, dweight = torch.ops.cp_volta.tiled_rms_norm_backward(dy, x, weight, ctx.eps, ctx.tile)
    return dx, dweight, None, None


_forward.register_autograd(_backward, setup_context=_setup)
