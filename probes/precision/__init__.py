"""Which numbers of a model leave its dtype, in which module, and how near are the others?

Declared here without torch. Axes:

model       a preset of probes.models (`…-outlier` reaches what trained checkpoints reach), or the path of a
            checkpoint folder (with a slash in it)
precision   fp32; fp16: parameters in float16; amp-fp16, amp-bf16: float32 parameters under autocast
compile     none, layers (each alone), model (whole): compiled code skips roundings in between, so its values are
            also held against eager's, as compiled and with Inductor's emulate_precision_casts
attention   as of train-step; eager writes scores out in the dtype before it scales them
scale       what the loss is multiplied by before the backward, at first; 0: the precision's own, which is
            GradScaler's 65,536 for amp-fp16 and 1 for the others
updates     steps of AdamW after the looking, with GradScaler for amp-fp16, its skipped steps counted; 0: none
seq, batch  of the tokens that pass through; other tokens reach other values
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from harness.cells import Axes, Device, Measure, Probe
from probes import train_step
from probes.models import shape_of, train_flops
from probes.train_step import TrainStepAxes

GRAD_SCALER_INIT = 65_536.0  # torch.amp.GradScaler's init_scale
_DTYPES: dict[str, Literal["fp32", "fp16", "bf16"]] = {
    "fp32": "fp32",
    "fp16": "fp16",
    "amp-fp16": "fp16",
    "amp-bf16": "bf16",
}


class PrecisionAxes(Axes, frozen=True, kw_only=True):
    """One model in one precision; see the module."""

    model: str = "tiny-qwen2-4h"
    precision: Literal["fp32", "fp16", "amp-fp16", "amp-bf16"] = "amp-fp16"
    compile: Literal["none", "layers", "model"] = "none"
    attention: Literal["eager", "sdpa", "math", "efficient", "xformers", "flash", "cudnn"] = "sdpa"
    scale: Annotated[float, msgspec.Meta(ge=0, le=2.0**40)] = 0.0
    updates: Annotated[int, msgspec.Meta(ge=0)] = 0
    seq: Annotated[int, msgspec.Meta(ge=2)] = 128
    batch: Annotated[int, msgspec.Meta(ge=1)] = 1

    def __post_init__(self) -> None:
        self.step_axes()

    @property
    def first_scale(self) -> float:
        """What the loss is multiplied by at first."""
        own = GRAD_SCALER_INIT if self.precision == "amp-fp16" else 1.0
        return self.scale or own

    def step_axes(self) -> TrainStepAxes:
        """The training step that these axes name. Raises ValueError for an unknown model."""
        return TrainStepAxes(
            model=self.model,
            compile=self.compile,
            attention=self.attention,
            dtype=_DTYPES[self.precision],
            precision="amp" if self.precision.startswith("amp") else "plain",
            step="full" if self.updates else "fwd_bwd",
            optimizer="adamw" if self.updates else "none",
            seq=self.seq,
            batch=self.batch,
        )


def skip(axes: Axes, device: Device) -> str:
    """Combinations that make no sense, with the reason."""
    assert isinstance(axes, PrecisionAxes)
    if axes.scale and not axes.precision.endswith("fp16"):
        return f"{axes.precision} has float32's range of exponents and scales no loss: leave scale at 0"
    return train_step.PROBE.skip(axes.step_axes(), device)


def _estimate_s(axes: Axes, device: Device, measure: Measure) -> float:
    """Looking is five forwards and two backwards; each of the two compilations as train-step has them."""
    assert isinstance(axes, PrecisionAxes)
    shape = shape_of(axes.model)
    if shape is None:
        return 60.0
    step = train_flops(shape, axes.batch, axes.seq) / (3e10 if device == "cpu" else 3e13)
    graphs = {"none": 0.0, "layers": 9.0, "model": 5.0 + 2.2 * shape.layers}[axes.compile]
    return 1.0 + (4 + axes.updates) * step + 2 * graphs


PROBE = Probe(
    name="precision",
    question="Which numbers of a model leave its dtype, in which module, and how near are the others?",
    axes=PrecisionAxes,
    work="probes.precision.work:run",
    timed=False,
    preload=(*train_step.PROBE.preload, "probes.precision.work"),
    prepare="probes.inductor_once:prepare",
    needs_prepare=train_step.PROBE.needs_prepare,
    ignores=("check", "warmup_steps", "steps"),
    sources=(*train_step.PROBE.sources, "probes.precision"),
    skip=skip,
    estimate_s=_estimate_s,
)
