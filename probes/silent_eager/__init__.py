"""Was what was asked to be compiled really compiled, or did it run eagerly in silence?

Declared here without torch. Axes:

cause       none: a real model, as the other axes say, is judged: `ok` when all of it ran compiled.
            Anything else: a small module that provokes this cause, to see that the judge notices: `ok` when it named
            that cause, `mismatch` when it did not.
              recompile-limit, accumulated-limit   too many versions of one frame; later ones run eagerly
              disabled-function    a function under torch.compiler.disable
              skipfile             a module of torch's own, whose files Dynamo does not look into
              unsupported-frame    a frame that Dynamo gives up as a whole
              suppressed-error     a backend that fails under torch._dynamo.config.suppress_errors
              backend-fallback     a backend that fails under tc_volta, which runs the graph eagerly on the record
              bf16                 Inductor on a card without native bfloat16; on a newer card the gate is told so
              cudagraphs-cpu-tensor, cudagraphs-mutation, cudagraphs-dynamic   graphs that Inductor leaves out
              nothing-compiled     a process that was told to run everything eagerly
model       a preset of probes.models, or the path of a checkpoint folder (with a slash in it)
compile     what is compiled, by tc_volta: mlp (of each layer), layers (each alone), model (whole)
mode        Inductor's mode
attention   as of train-step
dtype       of parameters and computation
seq, batch  tokens of a sequence, sequences of a batch

The verdict rests on a profile of one step, which asks nobody; Dynamo's log then says why.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from harness.cells import Axes, Device, Measure, Probe
from probes import train_step
from probes.train_step import TrainStepAxes

Positive = Annotated[int, msgspec.Meta(ge=1)]
Cause = Literal[
    "none",
    "recompile-limit",
    "accumulated-limit",
    "disabled-function",
    "skipfile",
    "unsupported-frame",
    "suppressed-error",
    "backend-fallback",
    "bf16",
    "cudagraphs-cpu-tensor",
    "cudagraphs-mutation",
    "cudagraphs-dynamic",
    "nothing-compiled",
]
THROUGH_INDUCTOR = ("bf16", "cudagraphs-cpu-tensor", "cudagraphs-mutation", "cudagraphs-dynamic")
_CUDA_ONLY = {
    "bf16": "Inductor asks for native bfloat16 on a GPU only",
    "cudagraphs-mutation": "on a CPU the reason is always the CPU: cudagraphs-cpu-tensor",
    "cudagraphs-dynamic": "on a CPU the reason is always the CPU: cudagraphs-cpu-tensor",
}


class SilentAxes(Axes, frozen=True, kw_only=True):
    """One model to be judged, or one cause to be noticed; see the module."""

    cause: Cause = "none"
    model: str = "tiny-qwen2-4h"
    compile: Literal["mlp", "layers", "model"] = "layers"
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default"
    attention: Literal["eager", "sdpa", "math", "efficient", "xformers", "flash", "cudnn"] = "sdpa"
    dtype: Literal["fp32", "fp16", "bf16"] = "fp32"
    seq: Annotated[int, msgspec.Meta(ge=2)] = 64
    batch: Positive = 1

    def step_axes(self) -> TrainStepAxes:
        """The training step that these axes name. Raises ValueError for an unknown model."""
        return TrainStepAxes(
            model=self.model,
            compile=self.compile,
            mode=self.mode,
            attention=self.attention,
            dtype=self.dtype,
            seq=self.seq,
            batch=self.batch,
        )

    def __post_init__(self) -> None:
        self.step_axes()


def skip(axes: Axes, device: Device) -> str:
    """Combinations that make no sense, with the reason."""
    assert isinstance(axes, SilentAxes)
    if axes.cause == "none":
        return train_step.PROBE.skip(axes.step_axes(), device)
    changed = [name for name in SilentAxes.__struct_fields__ if getattr(axes, name) != _default(name)]
    if others := [name for name in changed if name != "cause"]:
        return f"{axes.cause} brings a module of its own: {', '.join(others)} would have no effect"
    return _CUDA_ONLY.get(axes.cause, "") if device == "cpu" else ""


def _default(name: str) -> object:
    return next(field.default for field in msgspec.structs.fields(SilentAxes) if field.name == name)


def _inductor(axes: Axes, device: Device) -> bool:
    assert isinstance(axes, SilentAxes)
    return device == "cpu" and (axes.cause == "none" or axes.cause in THROUGH_INDUCTOR)


def _estimate_s(axes: Axes, device: Device, measure: Measure) -> float:
    assert isinstance(axes, SilentAxes)
    if axes.cause == "none":
        return train_step.PROBE.estimate_s(axes.step_axes(), device, measure)
    return 8.0 if axes.cause in THROUGH_INDUCTOR else 2.0


PROBE = Probe(
    name="silent-eager",
    question="Did all that was asked to be compiled run compiled, and if not, which line ran eagerly and why?",
    axes=SilentAxes,
    work="probes.silent_eager.work:run",
    timed=False,
    preload=(*train_step.PROBE.preload, "torch._inductor.cudagraph_utils", "probes.silent_eager.work"),
    prepare="probes.inductor_once:prepare",
    needs_prepare=_inductor,
    ignores=("check", "warmup_steps"),
    sources=(*train_step.PROBE.sources, "probes.silent_eager", "probes.dynamo_watch"),
    skip=skip,
    estimate_s=_estimate_s,
)
