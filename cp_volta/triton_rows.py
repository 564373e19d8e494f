"""Triton kernels for what a tile does row by row: softmax cross-entropy, RMSNorm, SwiGLU; each in one pass or two.

None multiplies matrices, so they serve Volta too, where Triton has no tensor cores. All arithmetic is float32;
roundings stand where the torch formulas have them (`cp_volta.rows`), to which tests hold each kernel.
Imported only where Triton is installed and the tensors are on a GPU.
"""
# mypy: ignore-errors

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOGITS_BLOCK = 8192
_FLAT_BLOCK = 2048
_PROGRAMS = 1024  # that share the rows of a norm's backward, each with one sum of its own


@triton.jit
def _cross_entropy(
    x_ptr, label_ptr, loss_ptr, power_ptr, vocab, ignore, GRAD: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * vocab
    label = tl.load(label_ptr + row)
    counts = label != ignore
    inside = (label >= 0) & (label < vocab)
    # Before anything is written: the sums below make every warp wait for it.
    picked = tl.load(x_ptr + tl.where(inside, label, 0)).to(tl.float32)
    top = float("-inf")
    total = 0.0
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), 0)
        top = higher
    lse = top + tl.log(total)
    loss = tl.where(inside, lse - picked, float("nan"))
    tl.store(loss_ptr + row, tl.where(counts, loss, 0.0))
    if GRAD:
        power = tl.where(counts, tl.load(power_ptr), 0.0)
        for start in range(0, vocab, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
            p = tl.exp(x - lse)
            p = tl.where(at == label, p - 1.0, p) * power
            tl.store(x_ptr + at, p.to(x_ptr.dtype.element_ty), mask=at < vocab)


def _on_its_device(function):
    """A kernel is launched on the current device, which need not be the tensors'."""

    @functools.wraps(function)
    def guarded(x, *rest):
        with torch.cuda.device_of(x):
            return function(x, *rest)

    return guarded


@_on_its_device
def cross_entropy_(
    logits_TV: Tensor, labels_T: Tensor, power: Tensor, ignore_index: int, grad: bool
) -> Tensor:
    """Losses [T], float32, zero where a token does not count, nan where a label is outside the vocabulary.

    With `grad`, the logits become their gradients times `power`; without, they stay.
    """
    rows, vocab = logits_TV.shape
    loss_T = torch.empty(rows, dtype=torch.float32, device=logits_TV.device)
    _cross_entropy[(rows,)](
        logits_TV,
        labels_T.contiguous(),
        loss_T,
        power,
        vocab,
        ignore_index,
        GRAD=grad,
        BLOCK=min(_LOGITS_BLOCK, triton.next_power_of_2(vocab)),
        num_warps=16,
    )
    return loss_T


@triton.jit
def _rms_norm(x_ptr, w_ptr, y_ptr, width, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < width
    x = tl.load(x_ptr + row * width + at, mask=mask, other=0.0).to(tl.float32)
    unit = x * tl.rsqrt(tl.sum(x * x, 0) / width + eps)
    unit = unit.to(x_ptr.dtype.element_ty).to(tl.float32)
    w = tl.load(w_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * width + at, (w * unit).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _rms_norm_backward(
    dy_ptr, x_ptr, w_ptr, dx_ptr, dw_ptr, rows, width, eps, EACH: tl.constexpr, BLOCK: tl.constexpr
):
    program = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < width
    w = tl.load(w_ptr + at, mask=mask, other=0.0).to(tl.float32)
    dw = tl.zeros((BLOCK,), tl.float32)
    for i in range(EACH):
        row = program * EACH + i
        live = mask & (row < rows)
        x = tl.load(x_ptr + row * width + at, mask=live, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * width + at, mask=live, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(x * x, 0) / width + eps)
        unit = x * inverse
        along = dy * w
        dx = (along - unit * (tl.sum(along * unit, 0) / width)) * inverse
        tl.store(dx_ptr + row * width + at, dx.to(dx_ptr.dtype.element_ty), mask=live)
        dw += dy * unit
    tl.store(dw_ptr + program * width + at, dw, mask=mask)


@_on_its_device
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm along the last dimension."""
    x = x.contiguous()
    y = torch.empty_like(x, dtype=torch.promote_types(x.dtype, weight.dtype))
    width = x.shape[-1]
    if x.numel():
        block = triton.next_power_of_2(width)
        _rms_norm[(x.numel() // width,)](x, weight, y, width, eps, BLOCK=block, num_warps=_warps(block))
    return y


@_on_its_device
def rms_norm_backward(dy: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(dx in x's dtype, sums [programs, width] whose sum over the first dimension is dweight)."""
    dy, x = dy.contiguous(), x.contiguous()
    width = x.shape[-1]
    rows = x.numel() // width
    each = max(1, triton.next_power_of_2(triton.cdiv(rows, _PROGRAMS)))
    programs = max(1, triton.cdiv(rows, each))
    dx = torch.empty_like(x)
    dw = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    _rms_norm_backward[(programs,)](
        dy, x, weight, dx, dw, rows, width, eps, EACH=each, BLOCK=block, num_warps=_warps(block)
    )
    return dx, dw


def _warps(block: int) -> int:
    return max(1, min(16, block // 256))


@triton.jit
def _swiglu(g_ptr, u_ptr, p_ptr, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    g = tl.load(g_ptr + at, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(u_ptr + at, mask=mask, other=0.0).to(tl.float32)
    a = (g * tl.sigmoid(g)).to(g_ptr.dtype.element_ty).to(tl.float32)
    tl.store(p_ptr + at, (a * u).to(p_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _swiglu_backward(g_ptr, u_ptr, dp_ptr, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    dtype = g_ptr.dtype.element_ty
    g = tl.load(g_ptr + at, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(u_ptr + at, mask=mask, other=0.0).to(tl.float32)
    dp = tl.load(dp_ptr + at, mask=mask, other=0.0).to(tl.float32)
    s = tl.sigmoid(g)
    a = (g * s).to(dtype).to(tl.float32)
    da = (dp * u).to(dtype).to(tl.float32)
    tl.store(g_ptr + at, (da * s * (1.0 + g * (1.0 - s))).to(dtype), mask=mask)
    tl.store(u_ptr + at, (dp * a).to(dtype), mask=mask)
    tl.store(dp_ptr + at, (a * u).to(dtype), mask=mask)


@_on_its_device
def swiglu_(g: Tensor, u: Tensor) -> Tensor:
    """silu(g) * u, in place of g."""
    _swiglu[(triton.cdiv(g.numel(), _FLAT_BLOCK),)](g, u, g, g.numel(), BLOCK=_FLAT_BLOCK)
    return g


@_on_its_device
def swiglu_backward_(g: Tensor, u: Tensor, dp: Tensor) -> None:
    """In place: g becomes its gradient, u its own, and dp, the product's gradient, becomes the product."""
    _swiglu_backward[(triton.cdiv(g.numel(), _FLAT_BLOCK),)](g, u, dp, g.numel(), BLOCK=_FLAT_BLOCK)
