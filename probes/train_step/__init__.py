"""How fast, and how much memory, is one training step of a real model; and are its gradients right?

Declared here without torch. Axes:

model           a preset of probes.models, or the path of a local checkpoint folder (with a slash in it)
attention       eager, sdpa: transformers' own; math: its sdpa held to torch's math kernel, the baseline;
                efficient, xformers, flash, cudnn: one kernel each, through tc_volta
compile         what is compiled: none, mlp (of each layer), layers (each alone), model (whole)
mode            Inductor's mode
dtype           of the computation
precision       plain: parameters in dtype. amp: float32 parameters, autocast to dtype, GradScaler for fp16
tiling          what exists one tile of the sequence at a time: none, loss, loss-mlp, all (and norms, projections);
                plan: cp_volta.prepare decides, on checkpoints and offload too, and the row has its prediction
offload         checkpoints wait in host memory
budget_gib      hold the process to so much of the card, as a smaller one would; 0: all of it
lora            rank of adapters, which alone are trained; 0: all parameters are
step            fwd_bwd: zero the gradients, forward with loss, backward, as the reference. full: and the optimizer
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from harness.cells import Axes, Device, Measure, Probe
from probes.models import check_name, shape_of, train_flops

Positive = Annotated[int, msgspec.Meta(ge=1)]
CUDA_KERNELS = ("efficient", "xformers", "cudnn")
HALF_ONLY = ("flash", "cudnn")  # on CUDA; torch's CPU kernel of the name takes float32
CUDAGRAPH_MODES = ("reduce-overhead", "max-autotune")


class TrainStepAxes(Axes, frozen=True, kw_only=True):
    """One training step; see the module."""

    model: str
    attention: Literal["eager", "sdpa", "math", "efficient", "xformers", "flash", "cudnn"] = "sdpa"
    compile: Literal["none", "mlp", "layers", "model"] = "none"
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default"
    dtype: Literal["fp32", "fp16", "bf16"] = "fp32"
    seq: Annotated[int, msgspec.Meta(ge=2)]
    batch: Positive = 1
    checkpointing: bool = False
    tiling: Literal["none", "loss", "loss-mlp", "all", "plan"] = "none"
    offload: bool = False
    budget_gib: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    step: Literal["fwd_bwd", "full"] = "fwd_bwd"
    precision: Literal["plain", "amp"] = "plain"
    optimizer: Literal["none", "adamw", "adamw8bit", "adamw_host"] = "none"
    lora: Annotated[int, msgspec.Meta(ge=0)] = 0

    def __post_init__(self) -> None:
        check_name(self.model)


def _skip(axes: Axes, device: Device) -> str:
    assert isinstance(axes, TrainStepAxes)
    reasons = (
        (device == "cpu" and axes.attention in CUDA_KERNELS, f"the {axes.attention} kernel is for CUDA"),
        (
            device == "cuda" and axes.attention in HALF_ONLY and axes.dtype == "fp32",
            f"the {axes.attention} kernel takes fp16 and bf16",
        ),
        (
            device == "cpu" and axes.compile != "none" and axes.mode in CUDAGRAPH_MODES,
            f"{axes.mode} means cudagraphs, which are for CUDA",
        ),
        (axes.compile == "none" and axes.mode != "default", "a mode of Inductor without anything to compile"),
        (axes.precision == "amp" and axes.dtype == "fp32", "autocast to float32 is plain float32"),
        (
            axes.tiling == "plan" and (axes.checkpointing or axes.offload),
            "the plan decides on checkpoints and offload",
        ),
        (axes.offload and not axes.checkpointing, "there are no checkpoints to offload"),
        (
            axes.offload and axes.compile == "model",
            "a compiled graph keeps its own checkpoints: with offload compile the layers or nothing",
        ),
        (device == "cpu" and axes.budget_gib > 0, "a memory budget is for CUDA"),
        ((axes.step == "full") != (axes.optimizer != "none"), "a full step has an optimizer, and only that"),
        (
            axes.step == "full" and axes.precision == "plain" and axes.dtype == "fp16" and not axes.lora,
            "GradScaler refuses fp16 parameters, and without it their gradients underflow: use precision amp",
        ),
    )
    return next((reason for holds, reason in reasons if holds), "")


def _estimate_s(axes: Axes, device: Device, measure: Measure) -> float:
    """A guess from the model's mathematics and typical rates; only `plan` and the progress line use it.

    Which GPU it will be is not known here: the rate lies between a V100's (a fifth of it) and an H200's (twice).
    """
    assert isinstance(axes, TrainStepAxes)
    shape = shape_of(axes.model)
    if shape is None:
        return 60.0
    rate = 3e10 if device == "cpu" else 2e14 if axes.dtype != "fp32" else 3e13
    step = train_flops(shape, axes.batch, axes.seq) * (4 / 3 if axes.checkpointing else 1) / rate
    if axes.attention in ("math", "eager") and device == "cuda":
        step *= 1 + axes.seq / 2_000
    per_graph = {"none": 0.0, "mlp": 4.0, "layers": 9.0, "model": 5.0 + 2.2 * shape.layers}
    check = 8 * step if measure.check else 0.0
    start = 0.1 if device == "cpu" else 4.0
    return start + per_graph[axes.compile] + (measure.steps + measure.warmup_steps + 2) * step + check


PROBE = Probe(
    name="train-step",
    question="How fast, and how much memory, is one training step, and are its gradients right?",
    axes=TrainStepAxes,
    work="probes.train_step.work:run",
    preload=(
        "torch",
        "torch._dynamo",
        "torch._inductor.compile_fx",
        "transformers.models.qwen2.modeling_qwen2",
        "transformers.models.qwen3.modeling_qwen3",
        "transformers.models.llama.modeling_llama",
        "probes.train_step.work",
    ),
    prepare="probes.inductor_once:prepare",
    needs_prepare=lambda axes, device: device == "cpu" and getattr(axes, "compile", "none") != "none",
    sources=(
        "probes.train_step",
        "probes.step_memory",
        "probes.models",
        "probes.parity",
        "probes.float64",
        "probes.text",
        "probes.peaks",
        "probes.gpu_state",
        "probes.inductor_once",
        "tc_volta",
        "cp_volta",
    ),
    skip=_skip,
    estimate_s=_estimate_s,
)
