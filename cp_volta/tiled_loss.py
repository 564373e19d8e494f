"""Cross-entropy of a language model's head, over tiles of the sequence: [tokens, vocabulary] never exists.

Legend: N tokens, H hidden, V vocabulary, T tokens of one tile.

The gradients of hidden states and weight are formed in the forward pass, tile by tile, while a tile's logits are
there: three products, as the untiled path, none twice. They are formed *unnormalised*: what backward brings
(1/N of the mean, a GradScaler's factor) is applied in float32 afterwards. Formed normalised in float16 they would
be 99.999 % zero at 524,288 tokens and 151,936 words. What of 1/N is no power of two is in them all the same, so that
nothing is rounded once more than on the untiled path; in float16 they also carry a power of two, chosen from the
weight's largest value so that nothing can overflow. Both are taken back with the rest.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from cp_volta.matmul import HALF, add_mm, check_tile, compute_dtype, sum_dtype, tiles
from cp_volta.rows import cross_entropy_
from tc_volta.autocast import without_autocast

Reduction = Literal["mean", "sum"]
_TILE_BYTES = 1 << 30
_LARGEST_POWER = 12  # 4,096: the smallest probability of 150,000 words is then a normal float16


def default_tile(vocab: int, element_bytes: int, in_place: bool = False) -> int:
    """Tokens of a tile whose logits take about 1 GiB, with the float32 copy that is made where not in place."""
    copy = 0 if in_place else 4
    rows = _TILE_BYTES // (vocab * (element_bytes + copy))
    return max(16, rows // 128 * 128 or rows)


def tiled_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    reduction: Reduction = "mean",
    num_items: int | Tensor | None = None,
    ignore_index: int = -100,
    tile: int | None = None,
    grad_dtype: torch.dtype | None = None,
) -> Tensor:
    """`F.cross_entropy(F.linear(hidden, weight, bias).float(), labels)`, without the logits of more than a tile.

    Shapes: hidden [..., H]; weight [V, H]; bias [V]; labels [...], already shifted, `ignore_index` for a token that
            does not count. Returns a 0-dim float32 (float64 of float64).
    reduction: "mean" over the tokens that count, or over `num_items` where given (all ranks', or all micro-batches'
            tokens); "sum". The mean over no token is nan with zero gradients, as torch's own.
    tile: tokens at a time; None for about 1 GiB of logits.
    grad_dtype: in which the weight's gradient is summed over tiles; float32 unless said.
    Autocast: products are taken in its dtype, inside, so that gradients of float32 inputs stay float32.
    Errors: ValueError for shapes or dtypes that do not fit. No second derivative.
    """
    _check(hidden, weight, labels, bias, reduction, num_items, tile)
    compute = compute_dtype(hidden, weight)
    flat, targets = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    grad = torch.is_grad_enabled()
    divisor = _divisor(flat, targets, ignore_index, num_items) if reduction == "mean" else None
    total: Tensor = torch.ops.cp_volta.tiled_cross_entropy(
        flat,
        weight,
        bias,
        targets,
        divisor,
        tile or default_tile(weight.shape[0], compute.itemsize, in_place=hidden.is_cuda),
        ignore_index,
        compute,
        _grad_dtype(grad_dtype, compute),
        grad and hidden.requires_grad,
        grad and (weight.requires_grad or (bias is not None and bias.requires_grad)),
    )[0]
    if divisor is None:
        return total
    nothing = torch.where(divisor > 0, 0.0, torch.nan)  # a constant beside the graph: gradients stay zero
    return total / torch.where(divisor > 0, divisor, 1.0) + nothing


def _divisor(flat: Tensor, targets: Tensor, ignore_index: int, num_items: int | Tensor | None) -> Tensor:
    """What the sum is divided by, 0-dim and wide."""
    if num_items is None:
        num_items = (targets != ignore_index).sum()
    wide = sum_dtype(flat.dtype)
    if isinstance(num_items, Tensor):
        return num_items.to(flat.device, wide)
    return flat.new_full((), num_items, dtype=wide)


def _check(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    reduction: str,
    num_items: int | Tensor | None,
    tile: int | None,
) -> None:
    check_tile(tile, "tiled_cross_entropy")
    if weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(f"hidden {tuple(hidden.shape)} does not fit a weight {tuple(weight.shape)} [V, H]")
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(f"labels {tuple(labels.shape)} for hidden {tuple(hidden.shape)}: one label a token")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias {tuple(bias.shape)} for {weight.shape[0]} words")
    if reduction not in ("mean", "sum"):
        raise ValueError(f"unknown reduction {reduction!r}; there are 'mean' and 'sum'")
    if reduction == "sum" and num_items is not None:
        raise ValueError("num_items divides a mean; with reduction 'sum' divide yourself")


def _grad_dtype(asked: torch.dtype | None, compute: torch.dtype) -> torch.dtype:
    wide = sum_dtype(compute)
    if asked in (None, wide) or (asked == compute == torch.bfloat16):
        return asked or wide
    raise ValueError(
        f"grad_dtype {asked}: the weight's gradient is summed in {wide}, or bfloat16 in bfloat16"
    )


@torch.library.custom_op("cp_volta::tiled_cross_entropy", mutates_args=())
def _forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    divisor: Tensor | None,
    tile: int,
    ignore_index: int,
    compute: torch.dtype,
    grad_dtype: torch.dtype,
    hidden_grad: bool,
    weight_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(sum of losses, dhidden, dweight, dbias, power): gradients of the sum, times `power`; empty if not asked."""
    out = _outputs(hidden, weight, bias, compute, grad_dtype, hidden_grad, weight_grad)
    total, dhidden, dweight, dbias, power = out
    for buffer in (total, dweight, dbias):
        buffer.zero_()
    power.copy_(_power(weight, divisor, compute if hidden_grad or weight_grad else torch.float32))
    with without_autocast(hidden.device.type):
        w_VH = weight.to(compute)
        b_V = None if bias is None else bias.to(compute)
        for part in tiles(hidden.shape[0], tile):
            h_TH = hidden[part].to(compute)
            logits_TV = torch.mm(h_TH, w_VH.t()) if b_V is None else torch.addmm(b_V, h_TH, w_VH.t())
            loss, d_TV = cross_entropy_(
                logits_TV, labels[part], power, ignore_index, hidden_grad or weight_grad
            )
            total += loss
            if hidden_grad:
                dhidden[part] = torch.mm(d_TV, w_VH)
            if weight_grad:
                add_mm(dweight, d_TV.t(), h_TH)
                if bias is not None:
                    dbias += d_TV.sum(0, dtype=grad_dtype)
            del logits_TV, d_TV
    return out


def _power(weight: Tensor, divisor: Tensor | None, compute: torch.dtype) -> Tensor:
    """What half gradients carry: of 1/divisor the part in (0.5, 1], and in float16 a power of two.

    That is the largest, at most 4,096, with which no gradient of a token can overflow: |dhidden| is at most
    2 max|weight| a token, since dlogits' magnitudes sum to at most 2.
    """
    power = torch.ones((), device=weight.device)
    if compute in HALF and divisor is not None:
        mantissa = torch.frexp(divisor.float()).mantissa
        power = torch.where(divisor > 0, 0.5 / mantissa, power)
    if compute == torch.float16:
        low, high = torch.aminmax(weight)
        bound = 2 * torch.maximum(low.abs(), high.abs()).float()
        power = power * 2.0 ** torch.floor(torch.log2(2.0**15 / bound)).clamp(0, _LARGEST_POWER)
    return power


def _outputs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    compute: torch.dtype,
    grad_dtype: torch.dtype,
    hidden_grad: bool,
    weight_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    wide = sum_dtype(compute)
    vocab = weight.shape[0]
    return (
        hidden.new_empty((), dtype=wide),
        hidden.new_empty(hidden.shape if hidden_grad else (0, hidden.shape[1])),
        weight.new_empty(weight.shape if weight_grad else (0, weight.shape[1]), dtype=grad_dtype),
        weight.new_empty(vocab if weight_grad and bias is not None else 0, dtype=grad_dtype),
        hidden.new_empty((), dtype=wide),
    )


@_forward.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    divisor: Tensor | None,
    tile: int,
    ignore_index: int,
    compute: torch.dtype,
    grad_dtype: torch.dtype,
    hidden_grad: bool,
    weight_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _outputs(hidden, weight, bias, compute, grad_dtype, hidden_grad, weight_grad)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, bias = inputs[:3]
    _, dhidden, dweight, dbias, power = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(dhidden, dweight, dbias, power)
    ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
    ctx.made = (inputs[9], inputs[10])


def _backward(ctx: Any, dtotal: Tensor | None, *rest: Tensor | None) -> tuple[Tensor | None, ...]:
    grads: list[Tensor | None] = [None] * 11
    if dtotal is None:
        return tuple(grads)
    dhidden, dweight, dbias, power = ctx.saved_tensors
    factor = dtotal / power
    hidden_dtype, weight_dtype, bias_dtype = ctx.dtypes
    hidden_made, weight_made = ctx.made
    if hidden_made:
        grads[0] = torch.ops.cp_volta.scaled(dhidden, factor, hidden_dtype)
    if weight_made:
        grads[1] = torch.ops.cp_volta.scaled(dweight, factor, weight_dtype)
        grads[2] = None if bias_dtype is None else torch.ops.cp_volta.scaled(dbias, factor, bias_dtype)
    return tuple(grads)


_forward.register_autograd(_backward, setup_context=_setup)
