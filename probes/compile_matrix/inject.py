"""Faults of a compiler, committed on purpose, so that each is seen to end in a verdict and not in a lost table."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from probes.compile_matrix import Inject


def settings(fault: Inject) -> dict[str, Any]:
    """Inductor's own switch for a broken ReLU kernel (`inject_relu_bug_TESTING_ONLY`), where the fault is that."""
    kind = {"compile-error": "compile_error", "wrong-kernel": "accuracy"}.get(fault)
    if kind is None:
        return {}
    return {f"{side}.inject_relu_bug_TESTING_ONLY": kind for side in ("cpp", "triton")}


def instead_of_compiling(fault: Inject) -> Callable[..., Any] | None:
    """A compiler that aborts, or never ends; or its code, which reads where nothing is. None: compile."""
    if fault == "crash-in-compiler":
        print("injected: the compiler aborts while it lowers this graph", flush=True)
        os.abort()
    if fault == "hang-in-autotuning":
        print("injected: AUTOTUNE addmm benchmarks a choice that never returns", flush=True)
        time.sleep(86_400)
    return _segfault if fault == "segfault-in-kernel" else None


def around(fault: Inject, compiled: Callable[..., Any]) -> Callable[..., Any]:
    """What goes wrong when the code runs."""
    if fault not in ("zero-gradient", "nan-gradient"):
        return compiled

    def run(*arguments: Any) -> Any:
        return compiled(*_tampered(list(arguments), fault))

    return run


def _tampered(arguments: list[Any], fault: Inject) -> list[Any]:
    """The gradient of the first matrix that has one is spoiled on its way out."""
    for i, argument in enumerate(arguments):
        if isinstance(argument, Tensor) and argument.requires_grad and argument.dim() == 2:
            arguments[i] = _Spoil.apply(argument, 0.0 if fault == "zero-gradient" else float("nan"))
            break
    return arguments


def _segfault(*_: Any) -> Any:
    print("injected: generated code reads address 0", flush=True)
    return ctypes.string_at(0)


class _Spoil(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:  # type: ignore[override]
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad * ctx.factor, None
