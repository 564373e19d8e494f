"""Recompute the first n decoder layers in backward, and keep their inputs on the device or in host memory.

The first n, not any n: backward comes to the others first, so what they saved is gone when recomputation begins.
transformers' own layers are used, through the attributes with which transformers itself switches checkpointing on.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cp_volta.host_memory import CHUNK_BYTES, HostMemory, available_bytes
from cp_volta.offload import Offloader, Stored
from cp_volta.recompute import SecondForward
from cp_volta.tiling import causal_model

_HOST_SHARE = 0.8  # of what is available, unless a limit is given


def checkpoint_layers(
    model: nn.Module,
    layers: int | None = None,
    *,
    offload: int | bool = False,
    host_limit_bytes: int | None = None,
) -> Offloader | None:
    """Checkpoint the first `layers` decoder layers (None: all; 0: none) of a Qwen2, Qwen3 or Llama, in place.

    offload: how many of them keep their input in host memory (True: all), the first ones; the rest keep it on the
             device. host_limit_bytes: of host memory at once; 80 % of what is available unless said.
    Returns the offloader, whose counts say what went where, or None without offload. Again replaces what was.
    Raises ValueError for numbers that make no sense.
    """
    every = list(causal_model(model).model.layers)  # type: ignore[union-attr, arg-type]
    count = _count("layers", layers, len(every), every_word=None)
    away = _count("offload", None if offload is True else int(offload), count, every_word=True)
    offloader = _offloader(every[0], host_limit_bytes) if away else None
    if host_limit_bytes is not None and not away:
        raise ValueError(f"host_limit_bytes {host_limit_bytes} without anything to offload")
    uncheckpoint(model)
    for i, layer in enumerate(every[:count]):
        keeper = offloader if i < away else None
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = functools.partial(_checkpointed, keeper)
    return offloader


def uncheckpoint(model: nn.Module) -> int:
    """Undo `checkpoint_layers` and transformers' own checkpointing; the number of layers that were checkpointed."""
    found = 0
    for layer in causal_model(model).model.layers:  # type: ignore[union-attr]
        found += bool(layer.gradient_checkpointing)
        layer.__dict__.pop("gradient_checkpointing", None)
        layer.__dict__.pop("_gradient_checkpointing_func", None)
    return found


def _count(name: str, asked: int | None, most: int, every_word: bool | None) -> int:
    if asked is None:
        return most
    if not 0 <= asked <= most:
        raise ValueError(f"{name}={asked}: 0 to {most}, or {every_word} for all")
    return asked


def _offloader(layer: nn.Module, limit: int | None) -> Offloader:
    if limit is None:
        limit = int(available_bytes() * _HOST_SHARE)
    if limit < 0:
        raise ValueError(f"host_limit_bytes {limit}: at least 0")
    pinned = next(layer.parameters()).device.type == "cuda"
    return Offloader(HostMemory(limit_bytes=limit, pinned=pinned, chunk_bytes=CHUNK_BYTES))


class _Input:
    """A layer's input: itself the first time, and what was kept of it when it is asked for again."""

    def __init__(self, hidden: Tensor, offloader: Offloader | None) -> None:
        self.live: Tensor | None = hidden
        self.offloader = offloader
        self.kept: Tensor | Stored = hidden.detach() if offloader is None else offloader.store(hidden)
        self.needs_grad = hidden.requires_grad

    def get(self) -> Tensor:
        if self.live is not None:
            hidden, self.live = self.live, None
            return hidden
        if isinstance(self.kept, Stored):
            assert self.offloader is not None
            again = self.offloader.load(self.kept)
        else:
            again = self.kept
        return again.detach().requires_grad_(self.needs_grad)


def _checkpointed(offloader: Offloader | None, layer: Callable[..., Any], hidden: Tensor, *rest: Any) -> Any:
    """What transformers calls in place of a layer's forward, its keywords bound already."""
    if torch.compiler.is_compiling():
        return _traced(offloader, layer, hidden, *rest)
    # The first argument has no elements: torch finds the device in it, whose random state it is to keep.
    return checkpoint(
        _run,
        hidden.new_empty(0),
        layer,
        _Input(hidden, offloader),
        *rest,
        use_reentrant=False,
        context_fn=_contexts,
    )


def _run(_where: Tensor, layer: Callable[..., Any], given: _Input, *rest: Any) -> Any:
    return layer(given.get(), *rest)


def _traced(offloader: Offloader | None, layer: Callable[..., Any], hidden: Tensor, *rest: Any) -> Any:
    """In a graph, which keeps what it likes: nothing can be taken to the host from inside one."""
    if offloader is not None:
        raise ValueError("offload from inside a compiled graph: compile what is inside the layers instead")
    return checkpoint(layer, hidden, *rest, use_reentrant=False)


def _contexts() -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
    return contextlib.nullcontext(), SecondForward()
