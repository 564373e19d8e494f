"""Two trainings of one cell, step by step side by side, compared bit by bit."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

import tc_volta
from harness.cells import Task
from harness.rows import CompileReport, Fact, Result, Verdict
from probes.determinism import DeterminismAxes
from probes.parity.bars import NOISY, UNIT_ROUNDOFF
from probes.parity.steps import same_bits
from probes.train_step.compiler_view import look
from probes.train_step.evidence import observe
from probes.train_step.training import Training

# cuBLAS is deterministic with a workspace of its own; torch refuses its products in deterministic mode otherwise.
# Source: torch.use_deterministic_algorithms; cuBLAS, "Results Reproducibility".
_CUBLAS = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
_REFUSAL = "use_deterministic_algorithms"  # in each of torch's refusals
_GRADIENT, _WEIGHT = "gradient of ", "weight "
# n terms added in another order differ by about sqrt(n) units of roundoff (Higham and Mary 2019, SIAM J. Sci. Comput.
# 41(5)); a gradient is a sum over tokens, and 65,536 of them are granted. At most NOISY, as in probes.parity.
SUM_UNITS = 256
Left = Mapping[str, Tensor]  # what a step left, by name


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first step after which bits differ, and the first tensor, in the order in which a step computes them."""

    step: int  # from 1; 0: what the two models began with
    name: str
    error: float  # RMS(second - first) / RMS(first)
    tensors: int  # that differ
    of: int
    worst: str  # the tensor that differs most for its bar
    times: float  # how many times its bar

    def __str__(self) -> str:
        at = f"step {self.step}" if self.step else "before the first step"
        return f"{at}: {self.name} differs by {self.error:.2e} of its RMS, {self.tensors} of {self.of} tensors do"


def run(axes: DeterminismAxes, task: Task) -> Result:
    """The verdict on the bits; `unsupported` where torch or tc_volta refuse what is asked."""
    try:
        with _algorithms(axes.deterministic):
            return _twice(axes, task)
    except tc_volta.Unsupported as refusal:
        return Result(status="unsupported", reason=str(refusal))
    except RuntimeError as error:
        if not axes.deterministic or _REFUSAL not in str(error):
            raise
        return Result(status="unsupported", reason=str(error).splitlines()[0][:400])


@contextlib.contextmanager
def _algorithms(deterministic: bool) -> Iterator[None]:
    """torch's deterministic algorithms, on or off, inside. The workspace is read when cuBLAS first starts."""
    before = torch.are_deterministic_algorithms_enabled()
    if deterministic:
        os.environ.setdefault(*_CUBLAS)
    torch.use_deterministic_algorithms(deterministic)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def _twice(axes: DeterminismAxes, task: Task) -> Result:
    first, second = (_made(axes, task) for _ in range(2))
    found = difference(0, _weights(first), _weights(second), first.dtype)
    compiled: CompileReport | None = None
    losses: list[tuple[float, float]] = []
    for step in range(1, task.measure.steps + 1):
        left = _stepped(first, task.seed + step)
        if (
            step == 1 and axes.compile != "none"
        ):  # before the second model compiles, which counts as a recompile
            compiled = look(first.model, [])
        right = _stepped(second, task.seed + step)
        found = found or difference(step, left, right, first.dtype)
        losses.append((float(left["loss"]), float(right["loss"])))
    attention = observe(axes.attention, first.step, task.device)
    result = Result(
        loss=tuple(loss for loss, _ in losses),
        attention=attention,
        compile=compiled,
        facts=_facts(found, losses, len(left)),
    )
    if not attention.honoured:
        words = f"asked for {attention.asked}, {attention.ran} ran"
        return msgspec.structs.replace(result, status="unsupported", reason=words)
    verdict, reason = judge(axes, found, losses, compiled, len(left))
    return msgspec.structs.replace(result, verdict=verdict, verdict_reason=reason)


def judge(
    axes: DeterminismAxes,
    found: Difference | None,
    losses: list[tuple[float, float]],
    compiled: CompileReport | None,
    tensors: int,
) -> tuple[Verdict, str]:
    """The verdict, and why. Non-finite losses come first: the bits of a NaN are no evidence."""
    for step, pair in enumerate(losses, 1):
        if not all(map(math.isfinite, pair)):
            return "nonfinite", f"step {step}: losses {pair[0]} and {pair[1]}: their bits say nothing"
    if found and axes.deterministic:
        return "mismatch", f"{found}, though deterministic algorithms were on"
    if found:
        size = f"{found.worst} differs most for its bar: {found.times:.2g} times that"
        verdict: Verdict = "caveat" if found.times <= 1 else "mismatch"
        return "nonfinite" if math.isnan(found.times) else verdict, f"{found}; {size}"
    same = f"the same bits twice: loss, gradients and weights ({tensors} tensors) after each of {len(losses)} steps"
    if compiled and compiled.fallbacks:
        return "caveat", f"{same}; but some of what was to be compiled ran eagerly: {compiled.fallbacks[0]}"
    return "ok", same


def difference(step: int, first: Left, second: Left, dtype: torch.dtype) -> Difference | None:
    """What differs in any bit; None where nothing does. Names as `_stepped` has them, in its order."""
    every = list(dict.fromkeys([*first, *second]))
    names = [name for name in every if not same_bits(first.get(name), second.get(name))]
    if not names:
        return None
    most, times = worst(first, second, names, dtype)
    return Difference(
        step=step,
        name=names[0],
        error=_ratio(_distance(first.get(names[0]), second.get(names[0])), _rms(first.get(names[0]))),
        tensors=len(names),
        of=len(every),
        worst=most,
        times=times,
    )


def worst(first: Left, second: Left, differing: Sequence[str], dtype: torch.dtype) -> tuple[str, float]:
    """The tensor that differs most for its bar, and how many times that: above 1 is more than rounding.

    Loss and gradients alone, and weights only where those are the same: AdamW's first steps are as long for a
    gradient that is rounding noise as for any. A difference may be SUM_UNITS units of roundoff, and at least one of
    the largest tensor's: a gradient that cancels to nearly zero is noise in both runs.
    """
    judged = [name for name in differing if not name.startswith(_WEIGHT)] or differing
    unit = UNIT_ROUNDOFF[dtype]
    bar = min(SUM_UNITS * unit, NOISY)
    kind = _WEIGHT if judged is differing else _GRADIENT
    largest = max((_rms(x) for name, x in first.items() if name.startswith(kind)), default=0.0)
    times = {}
    for name in judged:
        least = 0.0 if name == "loss" else unit * largest
        allowed = max(bar * _rms(first.get(name)), least)
        times[name] = _ratio(_distance(first.get(name), second.get(name)), allowed)
    return max(times.items(), key=lambda item: math.inf if math.isnan(item[1]) else item[1])


def _distance(a: Tensor | None, b: Tensor | None) -> float:
    """RMS(b - a); infinite where there is no such number."""
    if a is None or b is None or a.shape != b.shape:
        return math.inf
    return _rms(b.double() - a.double())


def _rms(a: Tensor | None) -> float:
    return 0.0 if a is None else float(a.double().square().mean().sqrt())


def _ratio(distance: float, scale: float) -> float:
    if scale:
        return distance / scale
    return math.inf if distance else 0.0


def _made(axes: DeterminismAxes, task: Task) -> Training:
    torch.manual_seed(task.seed)
    return Training(axes.step_axes(), task.device, task.seed)


def _stepped(training: Training, seed: int) -> dict[str, Tensor]:
    """One full step, and what it left, no copies: the loss, gradients from the output back, weights.

    The seed is for dropout: the two trainings share one random generator.
    """
    torch.manual_seed(seed)
    loss = training.step()
    gradients = {
        f"{_GRADIENT}{name}": parameter.grad.detach()
        for name, parameter in reversed(list(training.model.named_parameters()))
        if parameter.grad is not None
    }
    return {"loss": loss} | gradients | _weights(training)


def _weights(training: Training) -> dict[str, Tensor]:
    return {f"{_WEIGHT}{name}": parameter.detach() for name, parameter in training.model.named_parameters()}


def _facts(found: Difference | None, losses: list[tuple[float, float]], tensors: int) -> dict[str, Fact]:
    facts: dict[str, Fact] = {
        "steps": len(losses),
        "tensors": tensors,
        "tensors_that_differ": found.tensors if found else 0,
        "last_loss_difference": abs(losses[-1][1] - losses[-1][0]),
        "host_threads": torch.get_num_threads(),
        "cublas_workspace": os.environ.get(_CUBLAS[0], ""),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
    }
    if found:
        facts |= {
            "first_differing_step": found.step,
            "first_differing_tensor": found.name,
            "difference_over_rms": found.error,
            "worst_tensor": found.worst,
            "worst_over_bar": found.times,
        }
    return facts
