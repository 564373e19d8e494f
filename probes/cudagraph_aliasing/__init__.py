"""Gradients and outputs that live in a graph's own memory: right, wrong in silence, or refused?

A CUDA graph writes its outputs to the same addresses at every replay. `AccumulateGrad` takes a gradient that nobody
else holds for `.grad` as it is, without a copy; the next replay then overwrites what was to be accumulated. Reported as
pytorch #106321 (2.0.1, wrong gradients), #96693 (2.1, accumulation over four batches, 0.25 for 1.0, silent), #169545
(later: an error "overwritten by a subsequent run"). This probe asks the torch that is here.

Declared here without torch. Axes:

memory      cudagraphs: mode reduce-overhead, on CUDA. static: an emulation on any device: graphs run eagerly, and their
            results are copied to the same addresses each time, which nobody checks. own: compiled, no such memory
scenario    accumulate: two backwards into gradients that were None. accumulate-marked: cudagraph_mark_step_begin before
            each. accumulate-zeroed: gradients zeroed in place, the first of them having been None. accumulate-owned:
            the same, but there were gradients of the caller's own from the start. held-grads: gradients of a step read after the next.
            held-outputs: an output of a step read after the next. copied-outputs: a copy of it
"""

from __future__ import annotations

from typing import Literal

from harness.cells import Axes, Device, Measure, Probe


class AliasingAxes(Axes, frozen=True, kw_only=True):
    """One way of using what a compiled step returns; see the module."""

    memory: Literal["cudagraphs", "static", "own"] = "cudagraphs"
    scenario: Literal[
        "accumulate",
        "accumulate-marked",
        "accumulate-zeroed",
        "accumulate-owned",
        "held-grads",
        "held-outputs",
        "copied-outputs",
    ] = "accumulate"
    model: Literal["mlp", "layer", "lm"] = "mlp"
    dtype: Literal["fp32", "fp16", "bf16"] = "fp32"


def _skip(axes: Axes, device: Device) -> str:
    assert isinstance(axes, AliasingAxes)
    return "cudagraphs are for CUDA" if device == "cpu" and axes.memory == "cudagraphs" else ""


def _estimate_s(axes: Axes, device: Device, measure: Measure) -> float:
    assert isinstance(axes, AliasingAxes)
    return 1.0 if axes.memory == "static" else 15.0


PROBE = Probe(
    name="cudagraph-aliasing",
    question="Are gradients and outputs right that a graph keeps in its own memory, or wrong in silence, or refused?",
    axes=AliasingAxes,
    work="probes.cudagraph_aliasing.work:run",
    timed=False,
    preload=("torch", "torch._dynamo", "torch._inductor.compile_fx", "probes.cudagraph_aliasing.work"),
    ignores=("warmup_steps", "steps", "check", "cache"),
    prepare="probes.inductor_once:prepare",
    needs_prepare=lambda axes, device: device == "cpu" and getattr(axes, "memory", "") == "own",
    sources=(
        "probes.cudagraph_aliasing",
        "probes.compile_matrix",
        "probes.models",
        "probes.parity",
        "probes.float64",
        "probes.text",
        "probes.inductor_once",
    ),
    skip=_skip,
    estimate_s=_estimate_s,
)
