"""tc_volta::flash_attn: attention as one opaque op, so that a compiled graph holds it without a break.

The op carries the kernel's name as an argument and chooses "auto" when it runs, so tracing depends on nothing.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from tc_volta.autocast import as_autocast, without_autocast
from tc_volta.bias import bias_of, unsee
from tc_volta.choice import choose
from tc_volta.kernels import KERNELS, Kernel, Saved, math_backward
from tc_volta.layout import as_bshd, dense, empty_bshd, expand, packed, reduce
from tc_volta.request import Request, check, lse_dtype, request_of


def flash_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    kernel: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Scaled dot-product attention, differentiable, traced by torch.compile without a graph break.

    Shapes: q [B, H, S, D]; k, v [B, G, T, D], H a multiple of G (grouped queries); attn_mask broadcastable to
            [B, H, S, T], bool (True: may look) or additive. Returns out [B, H, S, D], and with return_lse also
            lse [B, H, S], the natural log of the sum of exp(scaled score), -inf where a query saw no key.
    Causal: S must equal T. window: keys seen by a query, itself included (needs causal); None for all.
    kernel: "auto", or a name of `KERNELS`; a named kernel that cannot serve raises.
    Autocast: q, k, v are cast to autocast's dtype, as scaled_dot_product_attention's are.
    Raises: ValueError with both numbers. Dropout is not offered. A gradient of lse is right, computed by the
            math backward (memory of S x T scores).
    """
    q, k, v = as_autocast(q, k, v)
    if attn_mask is not None and attn_mask.is_floating_point():
        attn_mask = attn_mask.to(q.dtype)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    out, lse = torch.ops.tc_volta.flash_attn(q, k, v, attn_mask, causal, scale, window or 0, kernel)
    return (out, lse) if return_lse else out


def flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    attn_mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    kernel: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """The share of (dq, dk, dv) that the keys given account for; for attention over several blocks of keys.

    Shapes as in `flash_attn`; `out` and `lse` are those over *all* blocks (merged), k and v are one block.
    Raises ValueError as `flash_attn` does.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    grads = torch.ops.tc_volta.flash_attn_backward(
        dout, None, q, k, v, out, lse, attn_mask, causal, scale, window or 0, kernel
    )
    return cast("tuple[Tensor, Tensor, Tensor]", grads)


@torch.library.custom_op("tc_volta::flash_attn", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    window: int,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    check(q, k, v, mask, causal, window)
    request = request_of(q, k, mask, causal, window)
    record = KERNELS[choose(request, kernel).kernel]
    if 0 in q.shape or 0 in k.shape:  # an empty block kills the CPU kernel's process
        lse = torch.full(q.shape[:3], -torch.inf, dtype=lse_dtype(q.dtype), device=q.device)
        return empty_bshd(q).zero_(), lse
    with without_autocast(q.device.type):
        call = _Call(record, request, q, k, v, mask)
        out, lse = record.forward(call.q, call.k, call.v, call.bias, call.causal, call.window, scale)
        out, lse = unsee(out, lse, call.blind)
    return as_bshd(out), packed(lse)


@_forward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    window: int,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    return empty_bshd(q), q.new_empty(q.shape[:3], dtype=lse_dtype(q.dtype))


@torch.library.custom_op("tc_volta::flash_attn_backward", mutates_args=())
def _backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    window: int,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:
    check(q, k, v, mask, causal, window)
    if 0 in q.shape or 0 in k.shape:
        return empty_bshd(q).zero_(), empty_bshd(k).zero_(), empty_bshd(v).zero_()
    request = request_of(q, k, mask, causal, window)
    # Fused kernels form rowsum(dO * O) themselves, so a gradient of lse has no way in.
    record = KERNELS["math" if dlse is not None else choose(request, kernel).kernel]
    with without_autocast(q.device.type):
        call = _Call(record, request, q, k, v, mask)
        saved, dout, dlse = call.saved(out, lse, scale, dout, dlse)
        grads = math_backward(dout, saved, dlse) if record.name == "math" else record.backward(dout, saved)
        dq, dk, dv = grads
        dk, dv = reduce(dk, k.shape[1]), reduce(dv, v.shape[1])
    return as_bshd(dq), as_bshd(dk), as_bshd(dv)


@_backward.register_fake
def _(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    window: int,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return empty_bshd(q), empty_bshd(k), empty_bshd(v)


class _Call:
    """Inputs as one kernel wants them: rows dense, heads expanded, mask and window as a bias."""

    def __init__(
        self, record: Kernel, request: Request, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
    ) -> None:
        native_window = request.window and mask is None and request.device in record.windowed_on
        self.window = request.window if native_window else 0
        self.bias, self.blind = (None, None) if native_window else bias_of(mask, request, q)
        self.causal = request.causal and self.bias is None
        heads = request.kv_heads if record.grouped else request.heads
        self.q, self.k, self.v = dense(q), expand(dense(k), heads), expand(dense(v), heads)

    def saved(
        self, out: Tensor, lse: Tensor, scale: float, dout: Tensor, dlse: Tensor | None
    ) -> tuple[Saved, Tensor, Tensor | None]:
        """What backward takes, with a blind query's share made zero: exp(score - inf)."""
        if self.blind is not None:
            row = self.blind.squeeze(-1)
            dout = dout.masked_fill(self.blind, 0.0)
            lse = lse.masked_fill(row, torch.inf)
            dlse = None if dlse is None else dlse.masked_fill(row, 0.0)
        saved = Saved(
            q=self.q,
            k=self.k,
            v=self.v,
            out=dense(out),
            lse=lse,
            bias=self.bias,
            causal=self.causal,
            window=self.window,
            scale=scale,
        )
        return saved, dense(dout), dlse


def _setup(
    ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]
) -> None:
    q, k, v, mask, causal, scale, window, kernel = inputs
    out, lse = output
    if isinstance(mask, Tensor) and mask.requires_grad:
        raise ValueError("a gradient of attn_mask is not computed; detach it")
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, out, lse, mask)  # type: ignore[arg-type]
    ctx.rest = (causal, scale, window, kernel)  # type: ignore[attr-defined]


def _autograd(ctx: object, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, mask = ctx.saved_tensors  # type: ignore[attr-defined]
    if dout is None:
        dout = torch.zeros_like(out)
    causal, scale, window, kernel = ctx.rest  # type: ignore[attr-defined]
    dq, dk, dv = torch.ops.tc_volta.flash_attn_backward(
        dout, dlse, q, k, v, out, lse, mask, causal, scale, window, kernel
    )
    return dq, dk, dv, None, None, None, None, None


_forward.register_autograd(_autograd, setup_context=_setup)
