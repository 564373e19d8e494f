"""Which lines of a model break its graph, and which guards make it compile again as its calls vary?

Declared here without torch. Axes:

model       a preset of probes.models, or the path of a checkpoint folder (with a slash in it)
compile     what is compiled, by tc_volta: mlp (of each layer), layers (each alone), model (whole)
attention   as of train-step: eager and sdpa are transformers' own, the kernels go through tc_volta's op
vary        what differs from call to call: none; seq, batch (longer, more each time); mode (train and eval in turn);
            int (`logits_to_keep`, a Python int that the model's forward takes)
dynamic     sizes as torch.compile treats them: auto (constant until a second value is seen), never, always
use_cache   keep keys and values, as a model does by default: each layer's index then is part of its graph
backend     aot_eager: breaks and guards are Dynamo's, and no code need be generated to see them. inductor adds the
            guards that code generation makes on sizes that vary
dtype       of parameters and computation
seq, batch  of the first call

The number of calls is `measure.steps`, two at least.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from harness.cells import Axes, Device, Measure, Probe
from probes import train_step
from probes.models import shape_of
from probes.train_step import TrainStepAxes

Positive = Annotated[int, msgspec.Meta(ge=1)]
GROWTH = 8  # tokens that `vary = "seq"` adds per call


class BreakAxes(Axes, frozen=True, kw_only=True):
    """One model, compiled, and how its calls vary; see the module."""

    model: str = "tiny-qwen2-4h"
    compile: Literal["mlp", "layers", "model"] = "model"
    attention: Literal["eager", "sdpa", "math", "efficient", "xformers", "flash", "cudnn"] = "sdpa"
    vary: Literal["none", "seq", "batch", "mode", "int"] = "none"
    dynamic: Literal["auto", "never", "always"] = "auto"
    use_cache: bool = False
    backend: Literal["aot_eager", "inductor"] = "aot_eager"
    dtype: Literal["fp32", "fp16", "bf16"] = "fp32"
    seq: Annotated[int, msgspec.Meta(ge=2)] = 32
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
            seq=self.seq,
            batch=self.batch,
        )


def skip(axes: Axes, device: Device) -> str:
    """Combinations that make no sense, with the reason."""
    assert isinstance(axes, BreakAxes)
    if axes.vary == "int" and axes.compile != "model":
        return "the int is an argument of the whole model's forward, which is not what is compiled"
    if axes.use_cache and axes.compile == "mlp":
        return "the cache is the attention's: an MLP sees nothing of it"
    return train_step.PROBE.skip(axes.step_axes(), device)


def _estimate_s(axes: Axes, device: Device, measure: Measure) -> float:
    assert isinstance(axes, BreakAxes)
    shape = shape_of(axes.model)
    layers = (shape.layers if shape else 24) if axes.compile == "model" else 1
    versions = 1 if axes.vary == "none" else measure.steps if axes.dynamic == "never" else 2
    return 1.0 + (0.6 if axes.backend == "aot_eager" else 6.0) * layers * versions


PROBE = Probe(
    name="graph-breaks",
    question="Which lines of a model break its graph, and which guards make it compile again as calls vary?",
    axes=BreakAxes,
    work="probes.graph_breaks.work:run",
    timed=False,
    preload=(*train_step.PROBE.preload, "probes.graph_breaks.work"),
    prepare="probes.inductor_once:prepare",
    needs_prepare=lambda axes, device: device == "cpu" and getattr(axes, "backend", "") == "inductor",
    ignores=("check", "warmup_steps"),
    sources=(*train_step.PROBE.sources, "probes.graph_breaks", "probes.dynamo_watch"),
    skip=skip,
    estimate_s=_estimate_s,
)
