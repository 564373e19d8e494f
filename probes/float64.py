"""A float64 reference that is float64 throughout.

A transformers model in double still upcasts *down*: RMSNorm, rotary and the loss ask for float32, about a hundred
operations in two layers, and its gradients are then no better than half of float32's own error. Inside
`float64_everywhere` such requests become float64, and any narrower operation that is left is an error.

It works at the dispatcher, below autograd, because a mode on torch's functions is off while backward runs: what is
recomputed there (activation checkpoints) would ask for float32 and get it. What a kernel does inside is not seen;
the tests hold gradients against difference quotients for that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_WIDE = (torch.float64, torch.complex128)


class NarrowOperation(AssertionError):
    """An operation inside `float64_everywhere` computed in less than float64."""


@contextlib.contextmanager
def float64_everywhere() -> Iterator[None]:
    """Run forward and backward of a `.double()` model in float64 alone. Costs about 20 microseconds an operation.

    Weights and buffers are the caller's to widen, before. New tensors without a dtype are float64 as well (the
    default dtype, which is the process's, is put back at the end).
    Raises NarrowOperation at the end, naming the operations, if one was narrower after all.
    """
    before = torch.get_default_dtype()
    widen = _Widen()
    torch.set_default_dtype(torch.float64)
    try:
        with widen:
            yield
    finally:
        torch.set_default_dtype(before)
    if widen.narrow:
        counts = ", ".join(f"{name} ({n} times)" for name, n in sorted(widen.narrow.items()))
        raise NarrowOperation(f"operations in less than float64: {counts}")


class _Widen(TorchDispatchMode):
    """Requests for float32 become requests for float64; operations that are narrow even so are counted."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow: dict[str, int] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        result = func(*args, **kwargs)
        if _is_narrow(_floating(result), _floating((args, kwargs))):
            self.narrow[str(func)] = self.narrow.get(str(func), 0) + 1
        return result


def _floating(tree: object) -> list[torch.dtype]:
    """dtypes of the floating and complex tensors in nested arguments or results."""
    dtypes = [leaf.dtype for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return [d for d in dtypes if d.is_floating_point or d.is_complex]


def _is_narrow(results: list[torch.dtype], inputs: list[torch.dtype]) -> bool:
    """A narrow result; or narrow inputs and nothing wide (a comparison, an update in place that returns None).

    A float32 tensor that is widened, or meets a float64 one, is exact: that computes in float64.
    """
    if any(d not in _WIDE for d in results):
        return True
    return bool(inputs) and not any(d in _WIDE for d in (*inputs, *results))
