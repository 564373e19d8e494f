"""Measure one training step. Imported inside a cell, and preloaded by its server: it touches no device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import msgspec
import torch

from harness.cells import Task
from harness.rows import Result, Status
from probes.models import shape_of, train_flops
from probes.peaks import peak_flops_per_s
from probes.train_step import TrainStepAxes
from probes.train_step.check import check
from probes.train_step.compiler_view import cache_use, cudagraph_skips, look
from probes.train_step.evidence import observe
from probes.train_step.timing import Timed
from probes.train_step.timing import run as take_steps
from probes.train_step.training import Training


def run(axes: TrainStepAxes, task: Task) -> Result:
    """First step, warm-up, timed steps; then, apart from the clock: profile, numerical check."""
    timed = Timed()
    found = _describe(axes, task)
    with _faults() as fault:
        training = Training(axes, task.device, task.seed)
        with cudagraph_skips() as skips:
            take_steps(training.step, task.measure, task.device, timed)
    found |= _timed_fields(timed)
    if fault.status != "ok":
        return Result(status=fault.status, reason=fault.reason, **found)
    if axes.compile != "none":
        found |= {"compile": look(training.model, skips), "facts": cache_use()}
    attention = observe(axes.attention, training.step, task.device)
    found["attention"] = attention
    if not attention.honoured:
        evidence = ", ".join(attention.evidence) or "nothing that looks like attention"
        reason = f"asked for {axes.attention}, {attention.ran} ran: {evidence}"
        return Result(status="unsupported", reason=reason, **found)
    if task.measure.check:
        parity = check(training)
        found |= {"parity": parity, "verdict": parity.verdict, "verdict_reason": parity.reason}
    return Result(**found)


def _describe(axes: TrainStepAxes, task: Task) -> dict[str, Any]:
    shape = shape_of(axes.model)
    found: dict[str, Any] = {"tokens_per_step": axes.batch * axes.seq}
    if shape is not None:
        found["flops_per_step"] = train_flops(shape, axes.batch, axes.seq)
    name = torch.cuda.get_device_name() if task.device == "cuda" and torch.cuda.is_available() else "this CPU"
    found["peak_flops_per_s"], found["peak_source"] = peak_flops_per_s(name, axes.dtype)
    return found


def _timed_fields(timed: Timed) -> dict[str, Any]:
    return {
        "first_step_s": timed.first_step_s,
        "step_s": tuple(timed.step_s),
        "loss": timed.losses(),
        "memory": timed.memory,
        "device_before": timed.before,
        "device_after": timed.after,
    }


class _Fault(msgspec.Struct):
    status: Status = "ok"
    reason: str = ""


@contextlib.contextmanager
def _faults() -> Iterator[_Fault]:
    """Out of memory and "this cannot be served" end the measurement, and what was measured is kept."""
    fault = _Fault()
    try:
        yield fault
    except torch.OutOfMemoryError as error:
        fault.status, fault.reason = "oom", str(error).splitlines()[0]
    except ValueError as error:  # tc_volta's, with the numbers: this kernel or mode is not for this card
        fault.status, fault.reason = "unsupported", str(error)
