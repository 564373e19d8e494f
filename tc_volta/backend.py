"""A backend for Dynamo that calls Inductor, and runs a graph eagerly, on the record, where Inductor fails on it.

`suppress_errors` is never used: after one suppressed failure Dynamo can stop compiling unrelated modules. Here a
failure costs one graph. The forward's is caught as it is compiled; the backward is compiled by autograd's first
use of it, outside any backend, so it is caught in the function that Inductor calls for each graph.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import torch

from tc_volta.report import Report

Compiled = Callable[..., Any]
_DYNAMO = torch._dynamo.exc
# Dynamo's own messages to itself, which a backend must let through.
_NOT_OURS = (_DYNAMO.RestartAnalysis, _DYNAMO.SkipFrame, _DYNAMO.Unsupported)


def recording(record: Report, backend: str) -> Compiled:
    """The backend for torch.compile: counts graphs in the record, and keeps each failure there.

    backend: "inductor", or the name of another of Dynamo's.
    """

    def compile_graph(graph: torch.fx.GraphModule, inputs: list[Any], **_: Any) -> Compiled:
        eager = _copy(graph)
        try:
            compiled = _through(backend, graph, inputs, record)
        except _NOT_OURS as message:
            record.skipped.append(f"{type(message).__name__}: {str(message)[:500]}")
            raise
        except Exception as error:  # whatever a compiler raises is this graph's failure, and is reported
            record.fallbacks.append(_told(error))
            return eager.forward
        record.graphs += 1
        return compiled

    return compile_graph


def _through(backend: str, graph: torch.fx.GraphModule, inputs: list[Any], record: Report) -> Compiled:
    if backend == "inductor":
        return _inductor(graph, inputs, record)
    compiled: Compiled = torch._dynamo.lookup_backend(backend)(graph, inputs)
    return compiled


def _inductor(graph: torch.fx.GraphModule, inputs: list[Any], record: Report) -> Compiled:
    """torch._inductor.compile, with the one argument more that lets a failing backward be caught."""
    from torch._inductor import compile_fx

    def compile_part(part: torch.fx.GraphModule, part_inputs: Any, **how: Any) -> Any:
        if not how.get("is_backward"):
            return compile_fx.compile_fx_inner(part, part_inputs, **how)
        eager = _copy(part)
        try:
            return compile_fx.compile_fx_inner(part, part_inputs, **how)
        except Exception as error:
            record.fallbacks.append(f"backward: {_told(error)}")
            return _boxed(eager)

    compiled = compile_fx.compile_fx(graph, inputs, inner_compile=compile_part, config_patches=record.options)
    return cast("Compiled", compiled)


def _copy(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The graph as it is now: a compiler that fails half-way may have rewritten its own."""
    return torch.fx.GraphModule(graph, copy.deepcopy(graph.graph))


def _boxed(graph: torch.fx.GraphModule) -> Compiled:
    from functorch.compile import make_boxed_func

    boxed: Compiled = make_boxed_func(graph.forward)
    return boxed


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:2000]}"
