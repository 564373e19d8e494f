"""What do caches, and what ran before in the same process, change: time, memory, values, or what is compiled?

Declared here without torch. One cell is three forks of a process that has compiled nothing, each stepping the same
module, compiled anew with torch's default settings:

    cold    empty caches of Inductor and Triton
    warm    another process, the caches that cold left
    after   one process, empty caches, where something else was compiled before

Warm and after are held to cold: bit by bit, then, where bits differ, to a float64 reference; and graph by graph:
how many, which sizes are symbols, which recompiles. This is why the harness gives each cell a process of its own.
Axes:

before      what ran before in `after`: nothing (the control: cold once more); same-cell; other-dtype; other-seqs (two
            other lengths: with the second, torch takes lengths for dynamic); failing-compile (a backend that raises,
            caught); suppressed-failure (the same under torch._dynamo.config.suppress_errors)
reset       torch._dynamo.reset() in between: does torch's own remedy help
model       as of compile-matrix: mlp, layer, lm, a preset, or the path of a checkpoint folder
mode        Inductor's mode
dtype       of parameters and computation
backend     inductor; or aot_eager, which generates no code: what Dynamo remembers shows in it too
seq, batch  tokens of a sequence, sequences of a batch
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from harness.cells import Axes, Device, Measure, Probe
from probes import compile_matrix
from probes.compile_matrix import MatrixAxes

Positive = Annotated[int, msgspec.Meta(ge=1)]


class PollutionAxes(Axes, frozen=True, kw_only=True):
    """One module, and what ran before it; see the module."""

    before: Literal[
        "nothing", "same-cell", "other-dtype", "other-seqs", "failing-compile", "suppressed-failure"
    ] = "nothing"
    reset: bool = False
    model: str = "mlp"
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default"
    dtype: Literal["fp32", "fp16", "bf16"] = "fp32"
    backend: Literal["inductor", "aot_eager"] = "inductor"
    seq: Annotated[int, msgspec.Meta(ge=2)] = 64
    batch: Positive = 2

    def __post_init__(self) -> None:
        self.matrix_axes()

    def matrix_axes(self) -> MatrixAxes:
        """The cell of compile-matrix that these axes name. Raises ValueError for an unknown model."""
        return MatrixAxes(
            model=self.model,
            mode=self.mode,
            dtype=self.dtype,
            backend=self.backend,
            seq=self.seq,
            batch=self.batch,
        )


def skip(axes: Axes, device: Device) -> str:
    """Combinations that make no sense, with the reason."""
    assert isinstance(axes, PollutionAxes)
    if axes.before == "nothing" and axes.reset:
        return "there is nothing to reset"
    return compile_matrix.skip(axes.matrix_axes(), device)


def _estimate_s(axes: Axes, device: Device, measure: Measure) -> float:
    assert isinstance(axes, PollutionAxes)
    compiled = {"nothing": 0, "same-cell": 1, "other-dtype": 1, "other-seqs": 2}.get(axes.before, 0)
    once = compile_matrix.PROBE.estimate_s(axes.matrix_axes(), device, measure)
    return (2.5 + compiled) * once


PROBE = Probe(
    name="cache-pollution",
    question="What do warm caches, and what ran before in the same process, change: time, memory, values, graphs?",
    axes=PollutionAxes,
    work="probes.cache_pollution.work:run",
    preload=(*compile_matrix.PROBE.preload, "probes.cache_pollution.work"),
    prepare="probes.inductor_once:prepare",
    needs_prepare=lambda axes, device: device == "cpu" and getattr(axes, "backend", "") == "inductor",
    ignores=("cache", "warmup_steps"),
    sources=(*compile_matrix.PROBE.sources, "probes.cache_pollution", "probes.dynamo_watch"),
    skip=skip,
    estimate_s=_estimate_s,
)
