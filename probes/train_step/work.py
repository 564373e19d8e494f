"""Measure one training step. Imported inside a cell, and preloaded by its server: it touches no device."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import msgspec
import torch

import tc_volta
from cp_volta.planning import DoesNotFit
from harness.cells import Task
from harness.rows import AttentionReport, CompileReport, Result, Status
from probes.models import shape_of, train_flops
from probes.peaks import peak_flops_per_s
from probes.train_step import TrainStepAxes, budget
from probes.train_step.check import check
from probes.train_step.compiler_view import cache_use, cudagraph_skips, look
from probes.train_step.evidence import observe
from probes.train_step.memory import attempt, out_of_memory
from probes.train_step.timing import Timed
from probes.train_step.timing import run as take_steps
from probes.train_step.training import Training

Found = dict[str, Any]


def run(axes: TrainStepAxes, task: Task) -> Result:
    """First step, warm-up, timed steps; then, apart from the clock: profile, numerical check."""
    timed = Timed()
    found = _describe(axes, task)
    training: Training | None = None
    with _faults() as fault, cudagraph_skips() as skips:
        if axes.budget_gib:
            found["facts"] = budget.cap(axes.budget_gib)
            found["notes"] = (f"held to {axes.budget_gib:g} GiB of this card",)
        cap = found.get("facts", {}).get("cap_bytes")
        training = Training(axes, task.device, task.seed, cap)
        found["facts"] = {**found.get("facts", {}), **_predicted(training)}
        take_steps(training.step, task.measure, task.device, timed)
    found |= _timed_fields(timed)
    if training is not None:
        found["facts"] = {**found.get("facts", {}), **_kept_on_host(training)}
    if training is not None and axes.compile != "none":
        found |= {"compile": _compiled(training, skips), "facts": {**found["facts"], **cache_use()}}
    if axes.budget_gib:
        budget.uncap()
    if fault.status != "ok" or training is None:
        return Result(status=fault.status, reason=fault.reason, **found)
    return _judged(axes, task, training, found)


def _judged(axes: TrainStepAxes, task: Task, training: Training, found: Found) -> Result:
    """What ran, and whether it is right. Running out of memory in here takes nothing from the timing."""
    attention, short = attempt(lambda: observe(axes.attention, training.step, task.device))
    if attention is None:
        found["notes"] = (
            *found.get("notes", ()),
            f"which kernel ran was not seen: no memory to profile a step: {short}",
        )
    else:
        found["attention"] = attention
        if not attention.honoured:
            return Result(status="unsupported", reason=_not_honoured(attention), **found)
    if task.measure.check:
        parity = check(training)
        found |= {"parity": parity, "verdict": parity.verdict, "verdict_reason": parity.reason}
    return Result(**found)


def _not_honoured(attention: AttentionReport) -> str:
    evidence = ", ".join(attention.evidence) or "nothing that looks like attention"
    return f"asked for {attention.asked}, {attention.ran} ran: {evidence}"


def _compiled(training: Training, skips: list[str]) -> CompileReport | None:
    with contextlib.suppress(KeyError):  # the model was refused before it was compiled
        return look(training.model, skips)
    return None


def _predicted(training: Training) -> dict[str, int | str]:
    """What the plan decided, and the peak that it expects; nothing without a plan."""
    if training.planned is None:
        return {}
    made = training.planned.plan
    choice = ", ".join(f"{name} {value:,}" for name, value in dataclasses.asdict(made.choice).items())
    return {"predicted_peak_bytes": int(made.peak.bytes), "plan": choice}


def _kept_on_host(training: Training) -> dict[str, int]:
    """How many checkpoints a step took to the host, and in how much of its memory; nothing without offload."""
    away = training.offloader
    if away is None:
        return {}
    return {"offloaded": away.offloaded, "kept_on_device": away.kept, "host_bytes": away.host.peak_bytes}


def _describe(axes: TrainStepAxes, task: Task) -> Found:
    shape = shape_of(axes.model)
    found: Found = {"tokens_per_step": axes.batch * axes.seq}
    if shape is not None:
        found["flops_per_step"] = train_flops(shape, axes.batch, axes.seq)
    name = torch.cuda.get_device_name() if task.device == "cuda" and torch.cuda.is_available() else "this CPU"
    found["peak_flops_per_s"], found["peak_source"] = peak_flops_per_s(name, axes.dtype)
    return found


def _timed_fields(timed: Timed) -> Found:
    return {
        "first_step_s": timed.first_step_s,
        "step_s": tuple(timed.step_s),
        "loss": timed.losses(),
        "memory": timed.memory(),
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
    except (
        tc_volta.Unsupported,
        budget.TooSmall,
        DoesNotFit,
    ) as error:  # with the numbers
        fault.status, fault.reason = "unsupported", str(error)
    except (MemoryError, RuntimeError) as error:
        if not (short := out_of_memory(error)):
            raise
        fault.status, fault.reason = "oom", short
