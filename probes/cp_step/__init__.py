"""How fast, and with how much memory and traffic, do N ranks train on one sequence; and is it the same training?

Declared here without torch. Axes: those of probes.cp_axes, the model, and whether its layers are checkpointed.
"""

from __future__ import annotations

from harness.cells import Axes, Device, Measure, Probe
from probes.cp_axes import CpAxes, devices, why_not
from probes.models import PRESETS, check_name, shape_of, train_flops
from probes.train_step import PROBE as TRAIN_STEP


class CpStepAxes(CpAxes, frozen=True, kw_only=True):
    """One training step over several ranks; see the module."""

    model: str
    checkpointing: bool = False

    def __post_init__(self) -> None:
        check_name(self.model)


def _skip(axes: Axes, device: Device) -> str:
    assert isinstance(axes, CpStepAxes)
    preset = PRESETS.get(axes.model)
    return why_not(axes, device, preset.heads if preset else None)


def _estimate_s(axes: Axes, device: Device, measure: Measure) -> float:
    assert isinstance(axes, CpStepAxes)
    shape = shape_of(axes.model)
    if shape is None:
        return 60.0
    rate = 2e10 if device == "cpu" else 1e14 * axes.cp_size
    step = train_flops(shape, axes.batch, axes.seq) / rate
    return (2.0 if device == "cpu" else 8.0) + (measure.steps + measure.warmup_steps + 8) * step


PROBE = Probe(
    name="cp-step",
    question="Do N ranks train as one does, how fast, and how much memory and traffic does each need?",
    axes=CpStepAxes,
    work="probes.cp_step.work:run",
    preload=(*TRAIN_STEP.preload[:-1], "torch.distributed", "probes.cp_step.work"),
    sources=("probes.cp_step", "probes.cp_axes", "probes.ranks", *TRAIN_STEP.sources, "probes.train_step"),
    skip=_skip,
    devices=devices,
    estimate_s=_estimate_s,
)
