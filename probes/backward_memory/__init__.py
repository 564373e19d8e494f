"""How much memory does a compiled step take beside an eager one, over the length, and what are the bytes?

Declared here without torch. Axes: as of train-step, and

compile     what is compiled: mlp (of each layer), layers (each alone), model (whole)
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from harness.cells import Axes, Device, Measure, Probe
from probes.models import check_name, shape_of, train_flops
from probes.train_step import CUDA_KERNELS, CUDAGRAPH_MODES
from probes.train_step import PROBE as TRAIN_STEP


class BackwardMemoryAxes(Axes, frozen=True, kw_only=True):
    """One step, compiled and eager; see the module."""

    model: str
    compile: Literal["mlp", "layers", "model"] = "layers"
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default"
    attention: Literal["eager", "sdpa", "math", "efficient", "xformers", "flash", "cudnn"] = "sdpa"
    dtype: Literal["fp32", "fp16", "bf16"] = "fp32"
    seq: Annotated[int, msgspec.Meta(ge=2)] = 256
    batch: Annotated[int, msgspec.Meta(ge=1)] = 1
    checkpointing: bool = False

    def __post_init__(self) -> None:
        check_name(self.model)


def _skip(axes: Axes, device: Device) -> str:
    assert isinstance(axes, BackwardMemoryAxes)
    if device == "cpu" and axes.attention in CUDA_KERNELS:
        return f"the {axes.attention} kernel is for CUDA"
    if device == "cpu" and axes.mode in CUDAGRAPH_MODES:
        return f"{axes.mode} means cudagraphs, which are for CUDA"
    return ""


def _estimate_s(axes: Axes, device: Device, measure: Measure) -> float:
    assert isinstance(axes, BackwardMemoryAxes)
    shape = shape_of(axes.model)
    if shape is None:
        return 60.0
    rate = 3e10 if device == "cpu" else 1e14
    return 10.0 + 12 * train_flops(shape, axes.batch, axes.seq) / rate


PROBE = Probe(
    name="backward-memory",
    question="How much memory does a compiled step take beside an eager one, and what are the bytes?",
    axes=BackwardMemoryAxes,
    work="probes.backward_memory.work:run",
    timed=False,
    preload=(*TRAIN_STEP.preload[:-1], "probes.backward_memory.work"),
    ignores=("warmup_steps", "steps", "check", "cache"),
    prepare=TRAIN_STEP.prepare,
    needs_prepare=TRAIN_STEP.needs_prepare,
    sources=("probes.backward_memory", "probes.step_memory", *TRAIN_STEP.sources),
    skip=_skip,
    estimate_s=_estimate_s,
)
