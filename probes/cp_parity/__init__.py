"""Is attention over N ranks the attention of one: out, dq, dk and dv, and does it send the bytes that it should?

Declared here without torch. Axes: those of probes.cp_axes, and the shape of one attention layer: its reference is
float64 on one device, its errors are max|difference| / max|reference| per tensor, held to the bars below. Or

model       a preset or checkpoint in training instead: logits and gradients of the first step, loss and gradient norm
            of each, and what all weights became, as probes.parity judges them: by the stock model and float64
updates     optimizer steps (AdamW, gradients clipped) on text
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from harness.cells import Axes, Device, Measure, Probe
from probes.cp_axes import CpAxes, devices, why_not
from probes.models import PRESETS, check_name, shape_of, train_flops

# About four units of roundoff of the dtype, and of float32 twenty: it is summed over blocks in float32 alone.
BARS = {"fp32": 2e-6, "fp16": 2e-3, "bf16": 1.5e-2}


class CpParityAxes(CpAxes, frozen=True, kw_only=True):
    """One attention layer over several ranks; see the module."""

    heads: Annotated[int, msgspec.Meta(ge=1)] = 12
    kv_heads: Annotated[int, msgspec.Meta(ge=1)] = 12
    head_dim: Annotated[int, msgspec.Meta(ge=1)] = 64
    causal: bool = True
    model: str = ""
    updates: Annotated[int, msgspec.Meta(ge=0)] = 0

    def __post_init__(self) -> None:
        if not self.model:
            if self.updates:
                raise ValueError("updates are a model's: name one")
            return
        check_name(self.model)
        if (self.heads, self.kv_heads, self.head_dim, self.causal) != (12, 12, 64, True):
            raise ValueError(
                "heads, kv_heads, head_dim and causal are the attention layer's; a model has its own"
            )
        if not self.updates:
            raise ValueError("a model is trained: updates has to be 1 or more")


def _skip(axes: Axes, device: Device) -> str:
    assert isinstance(axes, CpParityAxes)
    if axes.model:
        preset = PRESETS.get(axes.model)
        return why_not(axes, device, preset.heads if preset else None)
    if axes.heads % axes.kv_heads:
        return f"{axes.heads} query heads are no multiple of {axes.kv_heads} key/value heads"
    return why_not(axes, device, axes.heads)


def _estimate_s(axes: Axes, device: Device, measure: Measure) -> float:
    assert isinstance(axes, CpParityAxes)
    shape = shape_of(axes.model) if axes.model else None
    if shape is not None:
        return 10.0 + 4 * axes.updates * train_flops(shape, axes.batch, axes.seq) / (
            2e10 if device == "cpu" else 1e13
        )
    return 2.0 + axes.batch * axes.heads * axes.seq**2 * axes.head_dim * 20 / 2e10


PROBE = Probe(
    name="cp-parity",
    question="Is attention over N ranks that of one device, in output and gradients, and does it send what it should?",
    axes=CpParityAxes,
    work="probes.cp_parity.work:run",
    timed=False,
    preload=("torch", "torch.distributed", "probes.cp_parity.work"),
    ignores=("warmup_steps", "steps", "check", "cache"),
    sources=(
        "probes.cp_parity",
        "probes.cp_axes",
        "probes.ranks",
        "probes.launched",
        "probes.models",
        "probes.parity",
        "cp_volta",
        "tc_volta",
    ),
    skip=_skip,
    devices=devices,
    ranks=True,
    estimate_s=_estimate_s,
)
