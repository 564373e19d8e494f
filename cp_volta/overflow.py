"""Which module first made a number that is none: the name to look at when a loss turns to NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def first_nonfinite(model: nn.Module, forward: Callable[[], Any]) -> str:
    """The first module, in order of execution, with an inf or NaN in its output; "" where all is finite.

    forward: one forward of `model`, run without gradients, to its end, since other ranks may wait for what this one
    sends. A module counts once its children are done, so the innermost is named. The answer has what it made, and whether its input was still finite:
    "model.layers.3.mlp.down_proj: 17 inf, 0 NaN of 40,960; its input was finite, at most 6.4e+04".
    Compiled modules run as graphs and their insides are not seen: look before compiling.
    """
    found: list[str] = []
    handles = [
        module.register_forward_hook(_hook(name or type(model).__name__, found))
        for name, module in model.named_modules()
    ]
    try:
        with torch.no_grad():
            forward()
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else ""


def _hook(name: str, found: list[str]) -> Callable[[nn.Module, Any, Any], None]:
    def look(module: nn.Module, given: Any, made: Any) -> None:
        for tensor in [] if found else _tensors(made):
            if not bool(torch.isfinite(tensor).all()):
                found.append(f"{name}: {_told(tensor)}; {_input(given)}")
                break

    return look


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, dict):
        value = tuple(value.values())
    return [t for item in value for t in _tensors(item)] if isinstance(value, list | tuple) else []


def _told(tensor: Tensor) -> str:
    infs, nans = int(torch.isinf(tensor).sum()), int(torch.isnan(tensor).sum())
    return f"{infs:,} inf, {nans:,} NaN of {tensor.numel():,} in {str(tensor.dtype).removeprefix('torch.')}"


def _input(given: Any) -> str:
    tensors = _tensors(given)
    if not tensors:
        return "it has no floating-point input"
    if not all(bool(torch.isfinite(t).all()) for t in tensors):
        return "its input was not finite either"
    largest = max(float(t.abs().max()) for t in tensors if t.numel())
    return f"its input was finite, at most {largest:.2g}"
