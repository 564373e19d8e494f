"""The module as torch.compile makes it for a cell, with a count of the graphs that the compiler really took.

Stock `torch.compile`, but for the backend: a function of ours that hands each graph on with the mode's settings, as
torch does, and counts. So a frame that nobody compiled is told from one that was compiled: Inductor that refuses a
dtype on a card runs it eagerly without an error, and eager compared with eager is always right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from probes.compile_matrix import MatrixAxes, inject


@dataclass(kw_only=True)
class Compiled:
    """The callable, and what became of its graphs."""

    call: Callable[..., Any] = lambda *_: None
    options: dict[str, Any] = field(default_factory=dict)
    graphs: int = 0
    refused: list[str] = field(default_factory=list)  # graphs that the compiler handed back, with its words


def compiled(module: nn.Module, axes: MatrixAxes) -> Compiled:
    """`module` compiled as the axes ask, lazily: the first call compiles."""
    made = Compiled(options=options(axes))

    def backend(graph: torch.fx.GraphModule, inputs: list[Any], **_: Any) -> Callable[..., Any]:
        try:
            done = _compile(graph, inputs, axes, made.options)
        except torch._dynamo.exc.SkipFrame as message:
            made.refused.append(f"{type(message).__name__}: {str(message)[:300]}")
            raise
        made.graphs += 1
        return done

    made.call = torch.compile(module, backend=backend, dynamic=axes.dynamic)
    return made


def options(axes: MatrixAxes) -> dict[str, Any]:
    """Inductor's settings for the cell: those of its mode, and those of an injected fault."""
    if axes.backend != "inductor":
        return {}
    return {**torch._inductor.list_mode_options(axes.mode, axes.dynamic), **inject.settings(axes.inject)}


def _compile(
    graph: torch.fx.GraphModule, inputs: list[Any], axes: MatrixAxes, settings: dict[str, Any]
) -> Callable[..., Any]:
    if axes.backend != "inductor":
        by_name: Callable[..., Any] = torch._dynamo.lookup_backend(axes.backend)(graph, inputs)
        return by_name
    if broken := inject.instead_of_compiling(axes.inject):
        return broken
    done = torch._inductor.compile(graph, inputs, options=settings)
    return inject.around(axes.inject, done)
