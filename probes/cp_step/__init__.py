"""How fast, and with how much memory and traffic, do N ranks train on one sequence; and is it the same training?

Declared here without torch. Axes:

mode        none: one rank, stock attention, the baseline. ulysses; ring (zigzag shards); ring-contiguous;
            hybrid: ulysses 2 x a ring of the rest
cp_size     ranks that share the sequence
attention   auto, or a kernel of tc_volta
backend     auto: nccl with a GPU for each rank, gloo on a CPU. gloo on CUDA: all ranks on one GPU, which tells right
            from wrong and memory per rank, but no speed
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from harness.cells import Axes, Device, Measure, Probe
from probes.models import PRESETS, check_name, shape_of, train_flops
from probes.train_step import PROBE as TRAIN_STEP

Positive = Annotated[int, msgspec.Meta(ge=1)]


class CpStepAxes(Axes, frozen=True, kw_only=True):
    """One training step over several ranks; see the module."""

    model: str
    mode: Literal["none", "ulysses", "ring", "ring-contiguous", "hybrid"] = "ring"
    cp_size: Positive = 2
    attention: Literal["auto", "math", "efficient", "xformers", "flash", "cudnn"] = "auto"
    dtype: Literal["fp32", "fp16", "bf16"] = "fp32"
    seq: Annotated[int, msgspec.Meta(ge=2)]
    batch: Positive = 1
    checkpointing: bool = False
    backend: Literal["auto", "gloo"] = "auto"

    def __post_init__(self) -> None:
        check_name(self.model)

    @property
    def ulysses(self) -> int:
        """Ranks that deal the heads out."""
        return {"ulysses": self.cp_size, "hybrid": 2}.get(self.mode, 1)

    @property
    def layout(self) -> str:
        """Of the shards on the ring."""
        return "zigzag" if self.mode in ("ring", "hybrid") else "contiguous"


def _skip(axes: Axes, device: Device) -> str:
    assert isinstance(axes, CpStepAxes)
    preset = PRESETS.get(axes.model)
    parts = axes.cp_size * (2 if axes.layout == "zigzag" else 1)
    reasons = (
        ((axes.mode == "none") != (axes.cp_size == 1), "mode none is cp_size 1, and only that"),
        (
            axes.mode == "hybrid" and (axes.cp_size % 2 > 0 or axes.cp_size < 4),
            "hybrid is 2 x a ring: cp_size 4, 6, …",
        ),
        (axes.seq % parts > 0, f"{axes.seq} tokens do not divide into {parts} parts"),
        (
            preset is not None and preset.heads < axes.ulysses,
            f"{preset.heads if preset else 0} query heads do not serve {axes.ulysses} ranks",
        ),
        (
            device == "cpu" and axes.attention not in ("auto", "math", "flash"),
            f"{axes.attention} is for CUDA",
        ),
    )
    return next((reason for holds, reason in reasons if holds), "")


def _devices(axes: Axes) -> int:
    assert isinstance(axes, CpStepAxes)
    return 1 if axes.backend == "gloo" else axes.cp_size


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
    sources=("probes.cp_step", "probes.ranks", *TRAIN_STEP.sources, "probes.train_step"),
    skip=_skip,
    devices=_devices,
    estimate_s=_estimate_s,
)
