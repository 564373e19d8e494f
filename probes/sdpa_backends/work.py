"""Ask one kernel for each shape, see what ran, and hold output and gradients to float64."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

import tc_volta
from harness.cells import Task
from harness.rows import AttentionReport, Fact, Result, Verdict
from probes.sdpa_backends import BARS, SdpaAxes, Shape
from probes.sdpa_backends.calls import Inputs, Ruler, attend, inputs, reference
from probes.train_step.evidence import observe
from probes.train_step.memory import out_of_memory

NAMES = ("out", "dq", "dk", "dv")


@dataclass(frozen=True, kw_only=True)
class Found:
    """One shape: refused, or the kernels that ran and the errors, by `calls.Ruler`, per tensor."""

    shape: Shape
    refused: str = ""  # by forward, in its words
    backward_failed: str = ""
    ran: tuple[AttentionReport, ...] = ()  # of forward, of backward
    errors: dict[str, float] = field(default_factory=dict)

    @property
    def others(self) -> list[str]:
        """What ran instead of what was asked for."""
        passes = zip(("forward", "backward"), self.ran, strict=False)
        return [f"{name} ran {one.ran}" for name, one in passes if not one.honoured]

    @property
    def worst(self) -> tuple[float, str]:
        """The largest error and its tensor; a NaN is largest."""
        name = max(self.errors, key=lambda name: (math.isnan(self.errors[name]), _rank(self.errors[name])))
        return self.errors[name], name

    def __str__(self) -> str:
        if self.refused:
            return f"refused: {self.refused}"
        kernels = "/".join(dict.fromkeys(one.ran for one in self.ran))
        errors = ", ".join(f"{name} {error:.1e}" for name, error in self.errors.items())
        failed = f"; backward failed: {self.backward_failed}" if self.backward_failed else ""
        return f"{kernels}: {errors}{failed}"


def run(axes: SdpaAxes, task: Task) -> Result:
    """Every shape once; `unsupported` where the kernel refuses them all."""
    found = [_asked(axes, shape, task) for shape in axes.shapes()]
    facts: dict[str, Fact] = {_words(axes, one.shape): str(one) for one in found}
    taken = [one for one in found if not one.refused]
    if not taken:
        reason = f"all {len(found)} shapes refused; {_words(axes, found[0].shape)}: {found[0].refused}"
        return Result(status="unsupported", reason=reason, facts=facts)
    verdict, reason = judge(axes, found)
    return Result(
        verdict=verdict,
        verdict_reason=reason,
        attention=_report(axes, taken),
        facts={
            "shapes": len(found),
            "refused": len(found) - len(taken),
            "bar": BARS[axes.dtype],
            **_largest(taken),
            **facts,
        },
    )


def judge(axes: SdpaAxes, found: Sequence[Found]) -> tuple[Verdict, str]:
    """The verdict on all shapes, one at least accepted, and why: values first, then who computed them."""
    taken = [one for one in found if not one.refused]
    bar = BARS[axes.dtype]
    worst = max(taken, key=lambda one: (math.isnan(one.worst[0]), _rank(one.worst[0])))
    error, name = worst.worst
    what = f"{_words(axes, worst.shape)}: {name}"
    if not error <= bar:
        wrong = sum(not one.worst[0] <= bar for one in taken)
        so = f"ran {worst.ran[0].ran}; {wrong} of {len(taken)} shapes so"
        if math.isnan(error):
            return "nonfinite", f"{what} is not finite; {so}"
        if math.isinf(error):
            return "mismatch", f"{what} has a wrong shape or dtype; {so}"
        return "mismatch", f"{what} is wrong: error {error:.2e}, the bar is {bar:.1e}; {so}"
    for one in taken:
        if one.others:
            return "mismatch", f"{_words(axes, one.shape)}: asked for {axes.kernel}, {', '.join(one.others)}"
        if one.backward_failed:
            words = f"forward was accepted, backward failed: {one.backward_failed}"
            return "mismatch", f"{_words(axes, one.shape)}: {words}"
    kernels = ", ".join(dict.fromkeys(report.ran for one in taken for report in one.ran))
    right = f"{kernels} ran and is right on {len(taken)} of {len(found)} shapes"
    doubt = _doubt(axes, found)
    return "caveat" if doubt else "ok", f"{right}; worst is {what}: error {error:.2e}, bar {bar:.1e}{doubt}"


def _doubt(axes: SdpaAxes, found: Sequence[Found]) -> str:
    """What a reader of a right result must know, or ""."""
    words = ""
    if refused := [one for one in found if one.refused]:
        words += f"; refused {len(refused)}: {_words(axes, refused[0].shape)}: {refused[0].refused}"
    math_ran = [one for one in found if any(report.ran == "math" for report in one.ran)]
    if axes.kernel == "auto" and math_ran:
        words += (
            f"; fell to math, all scores in memory, on {len(math_ran)}: {_words(axes, math_ran[0].shape)}"
        )
    return words


def _asked(axes: SdpaAxes, shape: Shape, task: Task) -> Found:
    given = inputs(axes, shape, task.device, task.seed)
    leaves = [x.requires_grad_() for x in given[:3]]
    outs: list[Tensor] = []
    forward, refused = _observed(axes, task.device, lambda: outs.append(attend(axes, given)))
    if forward is None:
        return Found(shape=shape, refused=refused)
    grads: list[Tensor] = []
    backward, failed = _observed(
        axes, task.device, lambda: grads.extend(torch.autograd.grad(outs[0], leaves, given.dout))
    )
    got = [x.detach() for x in (*outs, *grads)]
    return Found(
        shape=shape,
        backward_failed=failed,
        ran=(forward, backward) if backward else (forward,),
        errors=_errors(axes, given, got),
    )


def _observed(axes: SdpaAxes, device: str, call: Callable[[], None]) -> tuple[AttentionReport | None, str]:
    """What ran, or None and the words of the refusal, warnings included: there torch says which rule was broken."""
    asked = "sdpa" if axes.kernel == "auto" else axes.kernel
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            return observe(asked, call, device), ""
        except (tc_volta.Unsupported, RuntimeError) as error:
            if isinstance(error, torch.AcceleratorError) or out_of_memory(error):
                raise  # a broken context, or too little memory, is no answer of the kernel's
            said = [_line(warning.message) for warning in heard]
            return None, "; ".join(dict.fromkeys([_line(error), *said]))[:600]


def _line(message: object) -> str:
    return (str(message).splitlines() or [type(message).__name__])[0].split(" (Triggered internally")[0]


def _errors(axes: SdpaAxes, given: Inputs, got: Sequence[Tensor]) -> dict[str, float]:
    """Of what was computed: of the output alone, where backward failed."""
    want = reference(given, causal=axes.mask == "causal")
    return {name: _error(x, ruler, given.q.dtype) for name, x, ruler in zip(NAMES, got, want, strict=False)}


def _error(got: Tensor, want: Ruler, dtype: torch.dtype) -> float:
    """Infinite for another shape or dtype, NaN where something is not finite."""
    if got.shape != want.value.shape or got.dtype != dtype:
        return math.inf
    error = float((got.double() - want.value).abs().max()) / want.scale
    return error if math.isfinite(error) else math.nan


def _largest(taken: Sequence[Found]) -> dict[str, Fact]:
    """The largest error of each tensor that was computed; a NaN is largest."""
    found: dict[str, Fact] = {}
    for name in NAMES:
        if errors := [one.errors[name] for one in taken if name in one.errors]:
            found[f"{name}_error"] = max(errors, key=_rank)
    return found


def _rank(error: float) -> float:
    return math.inf if math.isnan(error) else error


def _report(axes: SdpaAxes, taken: Sequence[Found]) -> AttentionReport:
    """All reports as one: what ran on any shape; the evidence of the first that was not honoured, else of the last."""
    reports = [report for one in taken for report in one.ran]
    shown = next((report for report in reports if not report.honoured), reports[-1])
    return AttentionReport(
        asked=axes.kernel,
        ran=", ".join(dict.fromkeys(report.ran for report in reports)),
        honoured=all(report.honoured for report in reports),
        evidence=shown.evidence,
        source=shown.source,
    )


def _words(axes: SdpaAxes, shape: Shape) -> str:
    return f"heads {axes.heads}/{shape.kv_heads}, head_dim {shape.head_dim}, seq {shape.seq}"
