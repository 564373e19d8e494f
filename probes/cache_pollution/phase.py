"""One phase in a process of its own: compile the module, step it, and note what that took and what was compiled."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from harness.cells import Task
from probes.cache_pollution import PollutionAxes
from probes.compile_matrix import CUDAGRAPH_MODES, MatrixAxes
from probes.compile_matrix.cases import batches, case, loss_scale
from probes.compile_matrix.compiled import options
from probes.dynamo_watch import recompiles, watching
from probes.parity.steps import Recorded, Schedule, record
from probes.step_memory import held, peak, wait
from probes.train_step.compiler_view import cache_use

_OTHER_DTYPE = {"fp32": "bf16", "fp16": "fp32", "bf16": "fp32"}
_LONGER = (8, 16)  # tokens, of the other lengths


@dataclass(kw_only=True)
class Phase:
    """What one phase took and compiled. The values lie in a file, as torch.save keeps a `Recorded`."""

    values: str
    compile_s: float  # what the first step took longer than the fastest later one
    first_step_s: float
    step_s: float
    held_bytes: int  # when the phase began: what earlier work left
    peak_bytes: int | None
    hits: int  # of Inductor's graph cache
    misses: int
    graphs: int = 0  # compiled in this phase
    runs: int = 0  # of compiled forward graphs, whenever they were compiled
    symbols: int = 0  # sizes of inputs that are symbols, in the graphs that ran, each counted once
    recompiles: list[str] = field(default_factory=list)
    given_up: list[str] = field(default_factory=list)


class PhaseLost(RuntimeError):
    """A phase's process ended without a result."""


def in_own_process(axes: PollutionAxes, task: Task, name: str, caches: Path, *, prior: bool) -> Phase:
    """Fork this process, which has compiled nothing and used no device, and run one phase there.

    caches: the folder of Inductor's and Triton's caches. prior: do first what `axes.before` says.
    Raises PhaseLost where the process died; what the phase raises is raised here.
    """
    fork = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=fork) as pool:
        try:
            return pool.submit(_phase, axes, task, name, caches, prior).result()
        except concurrent.futures.process.BrokenProcessPool as lost:
            raise PhaseLost(f"the process of phase {name!r} died") from lost


def _phase(axes: PollutionAxes, task: Task, name: str, caches: Path, prior: bool) -> Phase:
    for variable, folder in (("TORCHINDUCTOR_CACHE_DIR", "inductor"), ("TRITON_CACHE_DIR", "triton")):
        os.environ[variable] = str(caches / folder)  # both are read late
    made = _Made(options(axes.matrix_axes()), axes.backend)
    with watching() as watch:
        if prior:
            before(axes, task, made)
            gc.collect()
            if axes.reset:
                torch._dynamo.reset()
        heard = len(watch.causes)
        found = measure(axes.matrix_axes(), task, made, Path(task.folder) / f"{name}.pt")
    found.given_up = [str(one) for one in watch.causes[heard:]]
    return found


def before(axes: PollutionAxes, task: Task, made: _Made) -> None:
    """Compile and step what `axes.before` names, as another cell would have in this process."""
    cell = axes.matrix_axes()
    if axes.before == "same-cell":
        _step(cell, task, made.backend)
    elif axes.before == "other-dtype":
        _step(msgspec.structs.replace(cell, dtype=_OTHER_DTYPE[cell.dtype]), task, made.backend)
    elif axes.before == "other-seqs":
        for more in _LONGER:
            _step(msgspec.structs.replace(cell, seq=cell.seq + more), task, made.backend)
    elif axes.before == "failing-compile":
        with contextlib.suppress(torch._dynamo.exc.BackendCompilerFailed):
            _step(cell, task, _fails)
    elif axes.before == "suppressed-failure":
        with torch._dynamo.config.patch(suppress_errors=True):
            _step(cell, task, _fails)


def measure(cell: MatrixAxes, task: Task, made: _Made, values: Path) -> Phase:
    """Compile the cell's module, take the steps, write what they left to `values`."""
    graphs = made.graphs
    made.runs, made.ran = 0, {}
    known, used = len(recompiles()), cache_use()
    begun_bytes = held(task.device)
    starts: list[float] = []
    with peak(task.device) as most:
        left = _step(cell, task, made.backend, starts)
        wait(task.device)
    ends = [*starts[1:], time.perf_counter()]
    first, *later = (end - start for start, end in zip(starts, ends, strict=True))
    torch.save(left, values)
    return Phase(
        values=str(values),
        compile_s=max(0.0, first - min(later)),
        first_step_s=first,
        step_s=min(later),
        held_bytes=begun_bytes,
        peak_bytes=most[0],
        hits=cache_use()["fxgraph_cache_hit"] - used["fxgraph_cache_hit"],
        misses=cache_use()["fxgraph_cache_miss"] - used["fxgraph_cache_miss"],
        graphs=made.graphs - graphs,
        runs=made.runs,
        symbols=sum(made.ran.values()),
        recompiles=[f"{one.guard} ({one.where})" for one in recompiles()[known:]],
    )


class _Made:
    """A backend that hands each graph on as torch does, and counts.

    One for a whole process: Dynamo compiles anew for a backend that is another object, which is no pollution.
    """

    def __init__(self, settings: dict[str, Any], name: str) -> None:
        self.settings, self.name = settings, name
        self.graphs = self.runs = 0
        self.ran: dict[int, int] = {}  # graph number -> its symbolic sizes

    def backend(self, graph: torch.fx.GraphModule, inputs: list[Any], **_: Any) -> Callable[..., Any]:
        self.graphs += 1
        number, symbols = self.graphs, _symbols(graph)
        if self.name == "inductor":
            done = torch._inductor.compile(graph, inputs, options=self.settings)
        else:
            done = torch._dynamo.lookup_backend(self.name)(graph, inputs)

        def counted(*given: Any) -> Any:
            self.runs += 1
            self.ran[number] = symbols
            return done(*given)

        return counted


def _symbols(graph: torch.fx.GraphModule) -> int:
    """How many sizes of a graph's inputs are symbols: Dynamo makes each an input of its own."""
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    return sum(isinstance(node.meta.get("example_value"), torch.SymInt) for node in inputs)


def _step(
    cell: MatrixAxes, task: Task, backend: Callable[..., Any], starts: list[float] | None = None
) -> Recorded:
    """A new module of the cell, compiled as torch does by default (sizes dynamic once they vary), and its steps."""
    schedule = Schedule(steps=max(2, task.measure.steps))
    module: nn.Module = case(cell, task.device, task.seed)
    call = torch.compile(module, backend=backend)
    given = batches(cell, schedule.batches, task.device, task.seed)

    def before_step() -> None:
        wait(task.device)
        if starts is not None:
            starts.append(time.perf_counter())
        if cell.mode in CUDAGRAPH_MODES:
            torch.compiler.cudagraph_mark_step_begin()

    scale = loss_scale(cell)
    return record(call, module, given, schedule, scale=scale, before_step=before_step)


def _fails(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    raise RuntimeError("this backend fails on every graph")
