"""One cell of the matrix: reference, eager twice, compiled; times and peaks beside eager's; a verdict."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from harness.cells import Task
from harness.rows import Memory, Parity, Result
from probes.compile_matrix import CUDAGRAPH_MODES, MatrixAxes
from probes.compile_matrix.cases import Batch, batches, case, loss_scale, widened
from probes.compile_matrix.compiled import Compiled, compiled
from probes.models.build import DTYPES
from probes.parity.steps import Recorded, Schedule, Verdicts, record, reference, verdicts
from probes.step_memory import peak, wait
from probes.train_step.compiler_view import cudagraph_skips
from probes.train_step.memory import attempt, out_of_memory, release

# What torch says where it refuses a second backward rather than get it wrong.
_REFUSALS = (
    "donated buffers",
    "backward through the graph a second time",
    "accessing tensor output of CUDAGraphs",
)
_SCALAR = (str, int, float, bool)


@dataclass(kw_only=True)
class Side:
    """What one side left, its seconds (first call apart) and its peak."""

    recorded: Recorded
    first_s: float
    rest_s: float
    peak_bytes: int | None


def run(axes: MatrixAxes, task: Task) -> Result:
    """The verdict on the cell; a refusal of the compiler's is `unsupported`, memory that runs out is `oom`."""
    schedule = Schedule(
        steps=task.measure.steps,
        accumulate=axes.accumulate,
        set_to_none=axes.set_to_none,
        second_backward=axes.second_backward,
    )
    module = case(axes, task.device, task.seed)
    work = _Cell(module, axes, schedule, task)
    with cudagraph_skips() as skips:
        made = compiled(module, axes)
        try:
            return _judged(work, made, skips, work.lengths())
        except (MemoryError, RuntimeError) as error:
            if short := out_of_memory(error):
                return Result(status="oom", reason=short, facts=_facts(made, skips))
            if refusal := next((word for word in _REFUSALS if word in str(error)), ""):
                reason = f"refused with an error ({refusal}): {str(error).splitlines()[0][:400]}"
                return Result(status="unsupported", reason=reason, facts=_facts(made, skips))
            raise


class _Cell:
    """What is the same for every side of one cell."""

    def __init__(self, module: nn.Module, axes: MatrixAxes, schedule: Schedule, task: Task) -> None:
        self.module, self.axes, self.schedule, self.task = module, axes, schedule, task
        self.dtype = DTYPES[axes.dtype]
        self.scale = loss_scale(axes)
        self.cudagraphs = axes.mode in CUDAGRAPH_MODES

    def lengths(self) -> list[int]:
        """One; or two where lengths may change, the second on other guards than the first."""
        return (
            [self.axes.seq, self.axes.seq + self.axes.seq // 2 + 1] if self.axes.dynamic else [self.axes.seq]
        )

    def batches(self, seq: int) -> list[Batch]:
        return batches(self.axes, self.schedule.batches, self.task.device, self.task.seed, seq)

    def side(self, call: Callable[..., Any], given: list[Batch], *, compiled: bool = False) -> Side:
        starts: list[float] = []

        def before_step() -> None:
            wait(self.task.device)
            starts.append(time.perf_counter())
            if compiled and self.cudagraphs:
                torch.compiler.cudagraph_mark_step_begin()

        with peak(self.task.device) as most:
            left = record(call, self.module, given, self.schedule, scale=self.scale, before_step=before_step)
            wait(self.task.device)
        ends = [*starts[1:], time.perf_counter()]
        seconds = [b - a for a, b in zip(starts, ends, strict=True)]
        return Side(
            recorded=left, first_s=seconds[0], rest_s=min(seconds[1:], default=seconds[0]), peak_bytes=most[0]
        )

    def reference(self, given: list[Batch]) -> tuple[Recorded | None, str]:
        """The float64 run, or why there is none."""
        if not self.task.measure.check:
            return None, "no reference was taken: measure.check is false"
        release()
        scaled = f"; loss scaled by {self.scale:g}" if self.scale != 1.0 else ""
        ruler, short = attempt(
            lambda: reference(widened(self.module), given, self.schedule, scale=self.scale)
        )
        return ruler, f"no memory for float64: {short}" if ruler is None else f"float64{scaled}"


def _judged(work: _Cell, made: Compiled, skips: list[str], lengths: list[int]) -> Result:
    found: list[Verdicts] = []
    sides: list[tuple[Side, Side]] = []
    for seq in lengths:
        given = work.batches(seq)
        work.module.zero_grad(set_to_none=True)
        eager = work.side(work.module, given)
        again = work.side(work.module, given)
        mine = work.side(made.call, given, compiled=True)
        work.module.zero_grad(set_to_none=True)
        ruler, name = work.reference(given)
        found.append(
            verdicts(
                mine.recorded, eager.recorded, again.recorded, ruler, dtype=work.dtype, reference_name=name
            )
        )
        sides.append((again, mine))
    facts = _facts(made, skips) | _costs(*sides[0])
    if made.refused or not made.graphs:
        what = "; ".join(made.refused) or "Dynamo handed no graph to the compiler"
        return Result(status="unsupported", reason=f"ran eagerly, in silence: {what}", facts=facts)
    return _result(work, found, lengths, facts, sides[0])


def _result(
    work: _Cell, found: list[Verdicts], lengths: list[int], facts: dict[str, Any], sides: tuple[Side, Side]
) -> Result:
    order = ("nonfinite", "mismatch", "no_reference", "caveat", "ok")
    at, worst = min(enumerate(found), key=lambda pair: order.index(pair[1].whole.verdict))
    where = f"seq {lengths[at]}: " if len(lengths) > 1 else ""
    mine = sides[1]
    return Result(
        verdict=worst.whole.verdict,
        verdict_reason=where + worst.whole.reason,
        parity=worst.whole,
        first_step_s=mine.first_s,
        tokens_per_step=work.axes.batch * work.axes.seq * work.axes.accumulate,
        loss=tuple(mine.recorded.losses.values()),
        memory=Memory(
            allocated_peak_bytes=mine.peak_bytes if work.task.device == "cuda" else None,
            host_peak_bytes=mine.peak_bytes if work.task.device == "cpu" else None,
        ),
        facts=facts | {"output": _word(worst.output), "grad": _word(worst.grad)},
    )


def _word(parity: Parity) -> str:
    """A column of the table: the verdict, and the largest error beside eager's."""
    worst = parity.worst[0] if parity.worst else None
    if worst is None or worst.error is None:
        return parity.verdict
    eager = f" ({worst.eager_error:.1e})" if worst.eager_error is not None else ""
    return f"{parity.verdict} {worst.error:.1e}{eager}"


def _facts(made: Compiled, skips: list[str]) -> dict[str, Any]:
    counted = torch._dynamo.utils.counters
    facts: dict[str, Any] = {
        "graphs": made.graphs,
        "graph_breaks": sum(counted["graph_break"].values()),
        "cudagraph_skips": "; ".join(skips),
    }
    return facts | {f"option {k}": v if isinstance(v, _SCALAR) else str(v) for k, v in made.options.items()}


def _costs(eager: Side, mine: Side) -> dict[str, Any]:
    """Beside eager's; the compiler's seconds are what the first step took longer than a later one."""
    return {
        "compile_s": max(0.0, mine.first_s - mine.rest_s) if mine.first_s != mine.rest_s else None,
        "eager_step_s": eager.rest_s,
        "compiled_step_s": mine.rest_s,
        "eager_peak_bytes": eager.peak_bytes,
        "compiled_peak_bytes": mine.peak_bytes,
    }
