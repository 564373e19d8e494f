"""Which module first made a gradient that is no number: cp_volta.overflow's question, asked of the backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def first_nonfinite_gradient(model: nn.Module, backward: Callable[[], Any]) -> str:
    """The first module, in order of the backward, whose gradients have an inf or NaN; "" where all are finite.

    backward: a forward and its backward on an uncompiled `model` without gradients yet. Looked at are modules with parameters of their
    own: the gradient of the output (is the fault older?), of the input, and of each parameter. What overflows in
    between, in attention or in the loss, is named by the module that it arrives at, and said to have arrived.
    """
    found: list[str] = []
    handles = []
    for name, module in model.named_modules():
        own = list(module.named_parameters(recurse=False))
        if own and not isinstance(module, nn.Embedding):  # token numbers have no gradient
            handles.append(module.register_full_backward_hook(_module_hook(name, found)))
        handles += [
            parameter.register_post_accumulate_grad_hook(_parameter_hook(f"{name}.{part}", found))
            for part, parameter in own
            if parameter.requires_grad
        ]
    try:
        backward()
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else ""


def _module_hook(name: str, found: list[str]) -> Callable[[nn.Module, Any, Any], None]:
    def look(module: nn.Module, inputs: Any, outputs: Any) -> None:
        if found:
            return
        arrived, made = _present(outputs), _present(inputs)
        if bad := _nonfinite(arrived):
            found.append(f"{name}: the gradient that arrived at it, {bad}: made after it, or by the loss")
        elif bad := _nonfinite(made):
            at_most = max(float(t.abs().max()) for t in arrived)
            found.append(
                f"{name}: the gradient of its input, {bad}; the one that arrived, at most {at_most:.2g}"
            )

    return look


def _parameter_hook(name: str, found: list[str]) -> Callable[[Tensor], None]:
    def look(parameter: Tensor) -> None:
        if not found and parameter.grad is not None and (bad := _nonfinite([parameter.grad])):
            found.append(f"{name}: the parameter's gradient, {bad}")

    return look


def _present(gradients: Any) -> list[Tensor]:
    return [g for g in gradients if isinstance(g, Tensor) and g.numel()]


def _nonfinite(tensors: list[Tensor]) -> str:
    for tensor in tensors:
        if not bool(torch.isfinite(tensor).all()):
            infs, nans = int(torch.isinf(tensor).sum()), int(torch.isnan(tensor).sum())
            dtype = str(tensor.dtype).removeprefix("torch.")
            return f"{infs:,} inf, {nans:,} NaN of {tensor.numel():,} in {dtype}"
    return ""
