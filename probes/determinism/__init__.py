"""Does the same training, run twice, leave the same bits: losses, every gradient, every weight?

Declared here without torch. One cell is two models, made anew from the same seed, that take full steps (forward,
backward, AdamW) on the same batch in turn, in one process. After each step everything is compared bit by bit. What is
compiled is compiled for each of the two, for the second from the caches that the first left. Axes:

model           a preset of probes.models, or the path of a checkpoint folder (with a slash in it)
compile         what is compiled, by tc_volta: none, mlp (of each layer), layers (each alone), model (whole)
attention       as of train-step
dtype           of the computation
precision       plain: parameters in dtype. amp: float32 parameters, autocast to dtype, GradScaler for fp16
deterministic   torch.use_deterministic_algorithms, with the workspace that cuBLAS needs for it
seq, batch      tokens of a sequence, sequences of a batch

The number of steps is `measure.steps`.

    ok            the same bits
    caveat        other bits, by no more than another order of sums explains (work.SUM_UNITS): gradients are judged,
                  and weights where those are the same
    mismatch      more than that; or any other bit where deterministic algorithms were asked for
    nonfinite     a loss is not finite, which says nothing of its bits
    unsupported   (a status) an operation has no deterministic implementation, or another attention kernel ran
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from harness.cells import Axes, Device, Measure, Probe
from probes import train_step
from probes.train_step import TrainStepAxes

Positive = Annotated[int, msgspec.Meta(ge=1)]


class DeterminismAxes(Axes, frozen=True, kw_only=True):
    """One training, run twice; see the module."""

    model: str = "tiny-qwen2-4h"
    compile: Literal["none", "mlp", "layers", "model"] = "none"
    attention: Literal["eager", "sdpa", "math", "efficient", "xformers", "flash", "cudnn"] = "sdpa"
    dtype: Literal["fp32", "fp16", "bf16"] = "fp32"
    precision: Literal["plain", "amp"] = "plain"
    deterministic: bool = False
    seq: Annotated[int, msgspec.Meta(ge=2)] = 128
    batch: Positive = 2

    def __post_init__(self) -> None:
        self.step_axes()

    def step_axes(self) -> TrainStepAxes:
        """The training step that these axes name. Raises ValueError for an unknown model."""
        return TrainStepAxes(
            model=self.model,
            compile=self.compile,
            attention=self.attention,
            dtype=self.dtype,
            precision=self.precision,
            seq=self.seq,
            batch=self.batch,
            step="full",
            optimizer="adamw",
        )


def skip(axes: Axes, device: Device) -> str:
    """Combinations that make no sense, with the reason: those of train-step."""
    assert isinstance(axes, DeterminismAxes)
    return train_step.PROBE.skip(axes.step_axes(), device)


def _estimate_s(axes: Axes, device: Device, measure: Measure) -> float:
    assert isinstance(axes, DeterminismAxes)
    once = msgspec.structs.replace(measure, check=False, warmup_steps=0)
    return 2 * train_step.PROBE.estimate_s(axes.step_axes(), device, once)


PROBE = Probe(
    name="determinism",
    question="Does the same training, run twice, leave the same bits: losses, every gradient, every weight?",
    axes=DeterminismAxes,
    work="probes.determinism.work:run",
    timed=False,
    preload=(*train_step.PROBE.preload, "probes.determinism.work"),
    prepare="probes.inductor_once:prepare",
    needs_prepare=train_step.PROBE.needs_prepare,
    ignores=("check", "warmup_steps"),
    sources=(*train_step.PROBE.sources, "probes.determinism"),
    skip=skip,
    estimate_s=_estimate_s,
)
