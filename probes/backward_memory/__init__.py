"""Does a compiled training step take more memory than an eager one, and which tensors are the difference?

Declared here without torch. One cell takes the same step eagerly and compiled, with every allocation recorded, at `seq`
and at half of it; tells what lived at the peak (saved for backward, gradients, logits, temporaries), by name; and holds
loss and gradients of the compiled step to eager and to float64. Axes:

model           a preset of probes.models, or the path of a checkpoint folder (with a slash in it)
compile         what tc_volta compiles: mlp (of each layer), layers (each alone), model (whole). none: eager once more,
                the control
mode            Inductor's mode
checkpointing   each decoder layer is computed again in backward
attention, dtype, precision   as of train-step
seq, batch      tokens of a sequence, sequences of a batch
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from harness.cells import Axes, Device, Measure, Probe
from probes import train_step
from probes.train_step import TrainStepAxes

Positive = Annotated[int, msgspec.Meta(ge=1)]


class BackwardMemoryAxes(Axes, frozen=True, kw_only=True):
    """One step, twice; see the module."""

    model: str = "tiny-qwen2-4h"
    compile: Literal["none", "mlp", "layers", "model"] = "layers"
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default"
    checkpointing: bool = False
    attention: Literal["eager", "sdpa", "math", "efficient", "xformers", "flash", "cudnn"] = "sdpa"
    dtype: Literal["fp32", "fp16", "bf16"] = "fp32"
    precision: Literal["plain", "amp"] = "plain"
    seq: Annotated[int, msgspec.Meta(ge=4)] = 512
    batch: Positive = 1

    def step_axes(self) -> TrainStepAxes:
        """The training step that these axes name. Raises ValueError for an unknown model."""
        return TrainStepAxes(**msgspec.structs.asdict(self))

    def __post_init__(self) -> None:
        self.step_axes()


def skip(axes: Axes, device: Device) -> str:
    """Combinations that make no sense, with the reason."""
    assert isinstance(axes, BackwardMemoryAxes)
    return train_step.PROBE.skip(axes.step_axes(), device)


def _estimate_s(axes: Axes, device: Device, measure: Measure) -> float:
    assert isinstance(axes, BackwardMemoryAxes)
    return 3.0 + 2 * train_step.PROBE.estimate_s(axes.step_axes(), device, measure)


PROBE = Probe(
    name="backward-memory",
    question="Does a compiled step take more memory than an eager one, and which tensors are the difference?",
    axes=BackwardMemoryAxes,
    work="probes.backward_memory.work:run",
    timed=False,
    preload=(*train_step.PROBE.preload, "probes.backward_memory.work"),
    prepare="probes.inductor_once:prepare",
    needs_prepare=train_step.PROBE.needs_prepare,
    ignores=("warmup_steps", "steps"),
    sources=(*train_step.PROBE.sources, "probes.backward_memory"),
    skip=skip,
    estimate_s=_estimate_s,
)
