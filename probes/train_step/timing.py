"""Steps and their times, losses and memory peaks: the first step apart, then warm-up, then the timed ones."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from harness.cells import Measure
from harness.rows import DeviceState, Memory
from probes import gpu_state
from probes.step_memory import host_peak_bytes, reset_host_peak, wait
from probes.train_step.memory import release

Step = Callable[[], Tensor]


@dataclass
class Peak:
    """Of the device's allocator between two points; None on a CPU."""

    allocated: int | None = None
    reserved: int | None = None


@dataclass(kw_only=True)
class Timed:
    """What was measured so far; complete when `run` returns, partial when a step raised."""

    first_step_s: float | None = None
    step_s: list[float] = field(default_factory=list)
    loss: list[Tensor] = field(default_factory=list)
    first: Peak = field(default_factory=Peak)
    steady: Peak = field(default_factory=Peak)
    host_peak_bytes: int | None = None
    before: DeviceState | None = None
    after: DeviceState | None = None

    def losses(self) -> tuple[float, ...]:
        """One per step so far, first and warm-up included."""
        return tuple(torch.stack(self.loss).double().tolist()) if self.loss else ()

    def memory(self) -> Memory:
        """The peaks so far; a step that ran out of memory is in them."""
        return Memory(
            allocated_peak_bytes=self.steady.allocated,
            reserved_peak_bytes=self.steady.reserved,
            compile_allocated_peak_bytes=self.first.allocated,
            compile_reserved_peak_bytes=self.first.reserved,
            host_peak_bytes=self.host_peak_bytes,
        )


def run(step: Step, measure: Measure, device: str, timed: Timed) -> None:
    """Take the steps, noting into `timed` as it goes; a step that raises leaves what was noted, and the peaks."""
    try:
        _run(step, measure, device, timed)
    finally:
        timed.host_peak_bytes = host_peak_bytes()


def _run(step: Step, measure: Measure, device: str, timed: Timed) -> None:
    with _peaks(device, timed.first):
        began = time.perf_counter()
        timed.loss.append(step())
        wait(device)
        timed.first_step_s = time.perf_counter() - began
    release()  # what compiling left in the allocator's cache is no need of the steady steps
    timed.loss += [step() for _ in range(measure.warmup_steps)]
    wait(device)
    timed.before = gpu_state.read() if device == "cuda" else None
    with _peaks(device, timed.steady):
        _take(step, measure.steps, device, timed)


def _take(step: Step, steps: int, device: str, timed: Timed) -> None:
    if device != "cuda":
        for _ in range(steps):
            began = time.perf_counter()
            timed.loss.append(step())
            timed.step_s.append(time.perf_counter() - began)
        return
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    marks[0].record()
    for mark in marks[1:]:  # no synchronisation in between: the queue never runs dry for the clock's sake
        timed.loss.append(step())
        mark.record()
    timed.after = gpu_state.read()  # while the last steps still run: an idle GPU no longer throttles
    marks[-1].synchronize()
    timed.step_s += [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)]


@contextlib.contextmanager
def _peaks(device: str, peak: Peak) -> Iterator[None]:
    """Note the peaks of what runs inside, also when it raises."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        reset_host_peak()
    try:
        yield
        wait(device)
    finally:
        if device == "cuda":
            peak.allocated = torch.cuda.max_memory_allocated()
            peak.reserved = torch.cuda.max_memory_reserved()
