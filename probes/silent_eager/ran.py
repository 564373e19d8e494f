"""Which operators of a step ran outside every compiled graph, from a profile: evidence that asks nobody.

Each module that was to be compiled is called inside a range of ours. What Inductor made runs in ranges of its own
(`## Call CompiledFxGraph`), what autograd's tracer made in `CompiledFunction`. An operator inside the first and
outside the second ran eagerly, whatever Dynamo's counters say.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import msgspec
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

ASKED = "asked to be compiled"
_COMPILED = ("CompiledFunction", "## Call CompiledFxGraph")
_BOOKKEEPING = ("AOTDispatcher Runtime Wrapper Prologue", "Pregraph bytecode")
# Change what a tensor is called, launch nothing: a compiled graph returns views of its inputs this way.
_NO_WORK = {f"aten::{name}" for name in ("detach", "alias", "as_strided", "view", "t", "transpose", "expand")}
_LAUNCHES = ("cudaGraphLaunch", "hipGraphLaunch")


class Event(Protocol):
    """What of a profiler's event is read."""

    name: str
    cpu_parent: Any
    device_type: Any  # an enum that torch does not export


class Ran(msgspec.Struct, frozen=True, kw_only=True):
    """One step: calls of modules that were to be compiled, of compiled graphs in them, and what ran beside those."""

    asked: int
    compiled: int
    eager: dict[str, int]  # operator -> calls, most frequent first
    graph_launches: int  # of CUDA graphs


def mark(modules: Iterable[nn.Module]) -> None:
    """Have each call of these compiled modules run in a range of ours, outside what is compiled.

    Raises ValueError for a module that was not compiled.
    """
    for module in modules:
        inner = module._compiled_call_impl  # what Module.compile sets; it has no public name
        if inner is None:
            raise ValueError(f"{type(module).__name__} was not compiled: there is nothing to watch")
        module._compiled_call_impl = _in_range(inner)


def observe(step: Callable[[], Any], device: str) -> Ran:
    """Take one step under the profiler. Operators are told for the forward pass: a backward follows its graph."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    with profile(activities=activities) as seen:
        step()
        if device == "cuda":
            torch.cuda.synchronize()
    return classify(seen.events())


def classify(events: Iterable[Event]) -> Ran:
    """Count a profile's events. Pure, so that made-up profiles can be tested."""
    eager: collections.Counter[str] = collections.Counter()
    asked = compiled = launches = 0
    for event in events:
        if event.device_type.name != "CPU":  # kernels, and our ranges once more on the device's time line
            continue
        above = _above(event)
        asked += event.name == ASKED
        launches += event.name in _LAUNCHES
        if ASKED not in above:
            continue
        inside = any(name.startswith(_COMPILED) for name in above)
        compiled += event.name.startswith(_COMPILED) and not inside
        nested = any("::" in name or name in _BOOKKEEPING for name in above)
        if "::" in event.name and not inside and not nested and event.name not in _NO_WORK:
            eager[event.name] += 1
    return Ran(asked=asked, compiled=compiled, eager=dict(eager.most_common()), graph_launches=launches)


def _above(event: Event) -> list[str]:
    """Names of everything that an event ran inside of, innermost first."""
    names, parent = [], event.cpu_parent
    while parent is not None:
        names.append(parent.name)
        parent = parent.cpu_parent
    return names


def _in_range(inner: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with record_function(ASKED):
            return inner(*args, **kwargs)

    return call
