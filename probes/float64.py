"""A float64 reference that is float64 throughout.

A transformers model in double still upcasts *down*: RMSNorm, rotary and the loss ask for float32, about a
hundred operations, and its gradients are then no better than half of float32's own error. Inside
`float64_everywhere` such requests become float64, and any narrower floating result is an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_NARROW = (torch.float32, torch.float16, torch.bfloat16)


class NarrowOperation(AssertionError):
    """An operation inside `float64_everywhere` gave less than float64."""


class _Widen(TorchFunctionMode):
    """Requests for float32 become requests for float64."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        return func(*args, **kwargs)


class _Watch(TorchDispatchMode):
    """Notes operations whose result is a narrower float."""

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
        result = func(*args, **(kwargs or {}))
        for out in result if isinstance(result, tuple | list) else (result,):
            if isinstance(out, torch.Tensor) and out.dtype in _NARROW:
                self.narrow[str(func)] = self.narrow.get(str(func), 0) + 1
        return result


@contextlib.contextmanager
def float64_everywhere() -> Iterator[None]:
    """Run forward and backward of a `.double()` model in float64 alone.

    On a CPU, where backward runs in the calling thread. Recomputed activations too.
    Raises NarrowOperation, naming the operations, if one gave a narrower float after all.
    """
    watch = _Watch()
    with watch, _Widen():
        yield
    if watch.narrow:
        raise NarrowOperation(f"not float64: {watch.narrow}")
