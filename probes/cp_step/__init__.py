"""How fast, and with how much memory and traffic, do N ranks train on one sequence; and is it the same training?

Declared here without torch. Axes: those of probes.cp_axes, and

model           a preset of probes.models, or the path of a local checkpoint folder
checkpointing   each layer is computed again in backward, and its collectives run again
compile         none, layers (each alone), model (whole)
sharding        none: every rank holds all parameters. fsdp2: float32 shards over the ranks, computed in dtype
step            fwd_bwd: forward, backward, and the sum of gradients. full: and clipping, GradScaler (fp16), AdamW
"""

from __future__ import annotations

from typing import Literal

from harness.cells import Axes, Device, Measure, Probe
from probes.cp_axes import CpAxes, devices, why_not
from probes.models import PRESETS, check_name, shape_of, train_flops
from probes.train_step import PROBE as TRAIN_STEP


class CpStepAxes(CpAxes, frozen=True, kw_only=True):
    """One training step over several ranks; see the module."""

    model: str
    checkpointing: bool = False
    compile: Literal["none", "layers", "model"] = "none"
    sharding: Literal["none", "fsdp2"] = "none"
    step: Literal["fwd_bwd", "full"] = "fwd_bwd"

    def __post_init__(self) -> None:
        check_name(self.model)


def _skip(axes: Axes, device: Device) -> str:
    assert isinstance(axes, CpStepAxes)
    if axes.step == "full" and axes.dtype == "fp16" and axes.sharding == "none":
        return "GradScaler refuses fp16 parameters: shard them (fsdp2), which keeps them in float32"
    if axes.compile == "model" and axes.sharding == "fsdp2":
        return "fsdp2 gathers each layer's weights in hooks, which break a graph of the whole model"
    preset = PRESETS.get(axes.model)
    return why_not(axes, device, preset.heads if preset else None)


def _estimate_s(axes: Axes, device: Device, measure: Measure) -> float:
    assert isinstance(axes, CpStepAxes)
    shape = shape_of(axes.model)
    if shape is None:
        return 60.0
    rate = 2e10 if device == "cpu" else 1e14 * axes.cp_size
    step = train_flops(shape, axes.batch, axes.seq) / rate
    graphs = {"none": 0.0, "layers": 9.0, "model": 5.0 + 2.2 * shape.layers}[axes.compile]
    return (2.0 if device == "cpu" else 8.0) + graphs + (measure.steps + measure.warmup_steps + 8) * step


PROBE = Probe(
    name="cp-step",
    question="Do N ranks train as one does, how fast, and how much memory and traffic does each need?",
    axes=CpStepAxes,
    work="probes.cp_step.work:run",
    preload=(*TRAIN_STEP.preload[:-1], "torch.distributed", "probes.cp_step.work"),
    prepare=TRAIN_STEP.prepare,
    needs_prepare=TRAIN_STEP.needs_prepare,
    sources=(
        "probes.cp_step",
        "probes.cp_axes",
        "probes.ranks",
        "probes.launched",
        *TRAIN_STEP.sources,
        "probes.train_step",
    ),
    skip=_skip,
    devices=devices,
    ranks=True,
    estimate_s=_estimate_s,
)
