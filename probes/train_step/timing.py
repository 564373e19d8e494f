"""Steps and their times, losses and memory peaks: the first step apart, then warm-up, then the timed ones."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from harness.cells import Measure
from harness.rows import DeviceState, Memory
from probes import gpu_state

Step = Callable[[], Tensor]


@dataclass(kw_only=True)
class Timed:
    """What was measured so far; complete when `run` returns, partial when a step raised."""

    first_step_s: float | None = None
    step_s: list[float] = field(default_factory=list)
    loss: list[Tensor] = field(default_factory=list)
    memory: Memory = field(default_factory=Memory)
    before: DeviceState | None = None
    after: DeviceState | None = None

    def losses(self) -> tuple[float, ...]:
        """One per step so far, first and warm-up included."""
        return tuple(torch.stack(self.loss).double().tolist()) if self.loss else ()


def run(step: Step, measure: Measure, device: str, timed: Timed) -> None:
    """Take the steps, noting into `timed` as it goes."""
    with _peaks(device) as first:
        began = time.perf_counter()
        timed.loss.append(step())
        _wait(device)
        timed.first_step_s = time.perf_counter() - began
    timed.memory = Memory(
        compile_allocated_peak_bytes=first.allocated, compile_reserved_peak_bytes=first.reserved
    )
    timed.loss += [step() for _ in range(measure.warmup_steps)]
    _wait(device)
    timed.before = gpu_state.read() if device == "cuda" else None
    with _peaks(device) as steady:
        _take(step, measure.steps, device, timed)
    timed.after = gpu_state.read() if device == "cuda" else None
    timed.memory = Memory(
        allocated_peak_bytes=steady.allocated,
        reserved_peak_bytes=steady.reserved,
        compile_allocated_peak_bytes=first.allocated,
        compile_reserved_peak_bytes=first.reserved,
        host_peak_bytes=_host_peak_bytes(),
    )


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
    marks[-1].synchronize()
    timed.step_s += [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)]


class _Peak:
    allocated: int | None = None
    reserved: int | None = None


@contextlib.contextmanager
def _peaks(device: str) -> Iterator[_Peak]:
    peak = _Peak()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        _reset_host_peak()
    yield peak
    if device == "cuda":
        torch.cuda.synchronize()
        peak.allocated = torch.cuda.max_memory_allocated()
        peak.reserved = torch.cuda.max_memory_reserved()


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _reset_host_peak() -> None:
    with contextlib.suppress(OSError):  # the peak then counts from the process's start
        Path("/proc/self/clear_refs").write_text("5")


def _host_peak_bytes() -> int | None:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return None
