"""Autocast at the border of an opaque op, which torch's own autocast does not enter in the caller's dtype."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor


def as_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The inputs in autocast's dtype where it is on. float64 stays, as in torch's own rule for such ops.

    torch.library.register_autocast fixes one dtype for good, while a caller's autocast may be float16 or bfloat16.
    """
    device = tensors[0].device.type
    if not _autocasting(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def without_autocast(device: str) -> contextlib.AbstractContextManager[object]:
    """Autocast off: it would reach into a kernel, and compute the math kernel's float32 products in half."""
    return torch.autocast(device, enabled=False) if _autocasting(device) else contextlib.nullcontext()


def _autocasting(device: str) -> bool:
    return device != "meta" and torch.is_autocast_enabled(device)  # of meta it cannot be asked
