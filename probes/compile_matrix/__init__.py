"""Which mode of torch.compile gives right outputs and right gradients here, in which dtype, for which kind of module?

Declared here without torch. One cell is one module, compiled whole by stock `torch.compile` in a process of its own,
and held to eager and to float64 (`probes.parity.steps`). Axes:

model            mlp: two linear layers; layer: one decoder layer; lm: a two-layer causal LM; or a preset of
                 probes.models, or the path of a checkpoint folder (with a slash in it)
mode             Inductor's mode
dtype            of parameters and computation
backend          inductor; or a stage of it, without code generation: eager, aot_eager, aot_eager_decomp_partition
dynamic          compile for changing lengths, and check a second length too
seq, batch       tokens of a sequence, sequences of a batch
accumulate       backward passes whose gradients add up in one step
set_to_none      how gradients are cleared between steps: false keeps their memory
second_backward  each backward is run twice over one graph
inject           a fault, to see that it is caught: what a broken compiler does to the cell

The number of steps is `measure.steps`; `measure.check = false` takes no reference, and no verdict is a pass then.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from harness.cells import Axes, Device, Measure, Probe
from probes.models import check_name, shape_of

Positive = Annotated[int, msgspec.Meta(ge=1)]
SMALL = ("mlp", "layer", "lm")
CUDAGRAPH_MODES = ("reduce-overhead", "max-autotune")
Inject = Literal[
    "none",
    "compile-error",
    "wrong-kernel",
    "zero-gradient",
    "nan-gradient",
    "crash-in-compiler",
    "segfault-in-kernel",
    "hang-in-autotuning",
]
NEVER_COMPILES = ("crash-in-compiler", "segfault-in-kernel", "hang-in-autotuning")


class MatrixAxes(Axes, frozen=True, kw_only=True):
    """One cell of the matrix; see the module."""

    model: str = "lm"
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default"
    dtype: Literal["fp32", "fp16", "bf16"] = "fp32"
    backend: Literal["inductor", "eager", "aot_eager", "aot_eager_decomp_partition"] = "inductor"
    dynamic: bool = False
    seq: Annotated[int, msgspec.Meta(ge=2)] = 64
    batch: Positive = 2
    accumulate: Positive = 1
    set_to_none: bool = True
    second_backward: bool = False
    inject: Inject = "none"

    def __post_init__(self) -> None:
        if self.model not in SMALL:
            check_name(self.model)


def skip(axes: Axes, device: Device) -> str:
    """Combinations that make no sense, with the reason."""
    assert isinstance(axes, MatrixAxes)
    reasons = (
        (
            device == "cpu" and axes.mode in CUDAGRAPH_MODES,
            f"{axes.mode} means cudagraphs, which are for CUDA",
        ),
        (axes.backend != "inductor" and axes.mode != "default", "a mode of Inductor without Inductor"),
        (axes.backend != "inductor" and axes.inject != "none", "the faults are injected into Inductor"),
        (
            axes.inject in ("wrong-kernel", "compile-error") and axes.model != "mlp",
            f"{axes.inject} is a fault of ReLU kernels, which only the mlp has",
        ),
    )
    return next((reason for holds, reason in reasons if holds), "")


def _compiles(axes: Axes) -> bool:
    """Whether code is generated: a compiler that is broken on purpose gets no further."""
    assert isinstance(axes, MatrixAxes)
    return axes.backend == "inductor" and axes.inject not in NEVER_COMPILES


def _estimate_s(axes: Axes, device: Device, measure: Measure) -> float:
    """Of a quiet machine with two cores, or of a GPU; only `plan` and the progress line use it."""
    assert isinstance(axes, MatrixAxes)
    shape = shape_of(axes.model)
    layers = shape.layers if shape else {"mlp": 0, "layer": 1, "lm": 2}.get(axes.model, 24)
    tuning = 3.0 if axes.mode.startswith("max-autotune") else 1.0
    return 2.0 + (6.0 + 5.0 * layers if device == "cpu" else 4.0 + 2.0 * layers) * tuning


PROBE = Probe(
    name="compile-matrix",
    question="Which mode of torch.compile gives right outputs and right gradients, in which dtype?",
    axes=MatrixAxes,
    work="probes.compile_matrix.work:run",
    preload=(
        "torch",
        "torch._dynamo",
        "torch._inductor.compile_fx",
        "transformers.models.qwen2.modeling_qwen2",
        "transformers.models.qwen3.modeling_qwen3",
        "transformers.models.llama.modeling_llama",
        "probes.compile_matrix.work",
    ),
    prepare="probes.inductor_once:prepare",
    needs_prepare=lambda axes, device: device == "cpu" and _compiles(axes),
    ignores=("warmup_steps",),
    hands_on_to="bisect",
    sources=(
        "probes.compile_matrix",
        "probes.models",
        "probes.parity",
        "probes.float64",
        "probes.text",
        "probes.step_memory",
    ),
    skip=skip,
    estimate_s=_estimate_s,
)
