"""tc_volta::flash_attn: attention as one opaque op, so that a compiled graph holds it without a break.

The op carries the kernel's name as an argument and chooses "auto" when it runs, so tracing depends on nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tc_volta.kernels import KERNELS, Kernel, Saved, math_backward
from tc_volta.request import (
    Request,
    as_bshd,
    bias_of,
    check,
    expand,
    lse_dtype,
    reduce,
    request_of,
    unsee,
)


class Choice(NamedTuple):
    """A kernel and why it was taken."""

    kernel: str
    reason: str


def choose(request: Request, kernel: str = "auto") -> Choice:
    """The kernel that serves the request, with the reason. Runs nothing.

    Raises ValueError for an unknown kernel, and for a named kernel that cannot serve: never another instead.
    """
    if kernel != "auto":
        if kernel not in KERNELS:
            raise ValueError(f"unknown kernel {kernel!r}; there are auto, {', '.join(KERNELS)}")
        why = KERNELS[kernel].unusable(request)
        if why:
            raise ValueError(f"kernel {kernel!r} cannot serve this call: {why}")
        return Choice(kernel, "asked for")
    passed: list[str] = []
    for name, record in KERNELS.items():
        why = record.unusable(request)
        if not why:
            return Choice(name, "; ".join(passed) or "the fastest here")
        passed.append(f"not {name}: {why}")
    raise AssertionError("the math kernel serves every request")


def usable(request: Request) -> dict[str, str]:
    """Every kernel, with "" or the reason why it cannot serve the request."""
    return {name: record.unusable(request) for name, record in KERNELS.items()}


def flash_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: int = 0,
    kernel: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Scaled dot-product attention, differentiable, traced by torch.compile without a graph break.

    Shapes: q [B, H, S, D]; k, v [B, G, T, D], H a multiple of G (grouped queries); attn_mask broadcastable to
            [B, H, S, T], bool (True: may look) or additive. Returns out [B, H, S, D], and with return_lse also
            lse [B, H, S], the natural log of the sum of exp(scaled score), -inf where a query saw no key.
    Causal: S must equal T. window: keys seen by a query, itself included (needs causal); 0 for all.
    kernel: "auto", or a name of `KERNELS`; a named kernel that cannot serve raises.
    Autocast: q, k, v are cast to autocast's dtype, as scaled_dot_product_attention's are.
    Raises: ValueError with both numbers. Dropout is not offered. A gradient of lse is right, computed by the
            math backward (memory of S x T scores).
    """
    device = q.device.type
    if torch.is_autocast_enabled(device) and q.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if attn_mask is not None and attn_mask.dtype not in (torch.bool, q.dtype):
        attn_mask = attn_mask.to(q.dtype)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    out, lse = torch.ops.tc_volta.flash_attn(q, k, v, attn_mask, causal, scale, window, kernel)
    return (out, lse) if return_lse else out


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
    check(q, k, v, causal, window)
    request = request_of(q, k, mask, causal, window)
    record = KERNELS[choose(request, kernel).kernel]
    if 0 in q.shape or 0 in k.shape:  # an empty block kills the CPU kernel's process
        lse = torch.full(q.shape[:3], -torch.inf, dtype=lse_dtype(q.dtype), device=q.device)
        return _empty_like_out(q).zero_(), lse
    call = _Call(record, request, q, k, v, mask)
    out, lse = record.forward(call.q, call.k, call.v, call.bias, call.causal, call.window, scale)
    out, lse = unsee(out, lse, call.blind)
    return as_bshd(out), lse.contiguous()


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
    return _empty_like_out(q), q.new_empty(q.shape[:3], dtype=lse_dtype(q.dtype))


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
    if 0 in q.shape or 0 in k.shape:
        return _empty_like_out(q).zero_(), _empty_like_out(k).zero_(), _empty_like_out(v).zero_()
    request = request_of(q, k, mask, causal, window)
    # Fused kernels form rowsum(dO * O) themselves, so a gradient of lse has no way in.
    record = KERNELS["math" if dlse is not None else choose(request, kernel).kernel]
    call = _Call(record, request, q, k, v, mask)
    if call.blind is not None:  # such a row's probabilities are zero: exp(score - inf)
        dout = dout.masked_fill(call.blind, 0.0)
        lse = lse.masked_fill(call.blind.squeeze(-1), torch.inf)
        dlse = None if dlse is None else dlse.masked_fill(call.blind.squeeze(-1), 0.0)
    saved = Saved(
        q=call.q,
        k=call.k,
        v=call.v,
        out=out,
        lse=lse,
        bias=call.bias,
        causal=call.causal,
        window=call.window,
        scale=scale,
    )
    grads = math_backward(dout, saved, dlse) if record.name == "math" else record.backward(dout, saved)
    dq, dk, dv = grads
    return as_bshd(dq), as_bshd(reduce(dk, k.shape[1])), as_bshd(reduce(dv, v.shape[1]))


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
    return _empty_like_out(q), _empty_like_out(k), _empty_like_out(v)


class _Call:
    """Inputs as one kernel wants them: heads expanded, mask and window as a bias."""

    def __init__(
        self, record: Kernel, request: Request, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
    ) -> None:
        native_window = request.window and mask is None and request.device in record.windowed_on
        self.window = request.window if native_window else 0
        self.bias, self.blind = (None, None) if native_window else bias_of(mask, request, q)
        self.causal = request.causal and self.bias is None
        self.q = q
        self.k, self.v = (k, v) if record.grouped else (expand(k, q.shape[1]), expand(v, q.shape[1]))


def _empty_like_out(x_BHSD: Tensor) -> Tensor:
    B, H, S, D = x_BHSD.shape
    return x_BHSD.new_empty((B, S, H, D)).transpose(1, 2)


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
