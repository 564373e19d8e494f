"""Is attention over N ranks the attention of one: out, dq, dk and dv, and does it send the bytes that it should?

Declared here without torch. Axes: those of probes.cp_axes, and the shape. The reference is float64 on one device;
errors are max|difference| / max|reference| per tensor, held to the bars below.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from harness.cells import Axes, Device, Measure, Probe
from probes.cp_axes import CpAxes, devices, why_not

# About four units of roundoff of the dtype, and of float32 twenty: it is summed over blocks in float32 alone.
BARS = {"fp32": 2e-6, "fp16": 2e-3, "bf16": 1.5e-2}


class CpParityAxes(CpAxes, frozen=True, kw_only=True):
    """One attention layer over several ranks; see the module."""

    heads: Annotated[int, msgspec.Meta(ge=1)] = 12
    kv_heads: Annotated[int, msgspec.Meta(ge=1)] = 12
    head_dim: Annotated[int, msgspec.Meta(ge=1)] = 64
    causal: bool = True


def _skip(axes: Axes, device: Device) -> str:
    assert isinstance(axes, CpParityAxes)
    if axes.heads % axes.kv_heads:
        return f"{axes.heads} query heads are no multiple of {axes.kv_heads} key/value heads"
    return why_not(axes, device, axes.heads)


def _estimate_s(axes: Axes, device: Device, measure: Measure) -> float:
    assert isinstance(axes, CpParityAxes)
    return 2.0 + axes.batch * axes.heads * axes.seq**2 * axes.head_dim * 20 / 2e10


PROBE = Probe(
    name="cp-parity",
    question="Is attention over N ranks that of one device, in output and gradients, and does it send what it should?",
    axes=CpParityAxes,
    work="probes.cp_parity.work:run",
    timed=False,
    preload=("torch", "torch.distributed", "probes.cp_parity.work"),
    ignores=("warmup_steps", "steps", "check", "cache"),
    sources=("probes.cp_parity", "probes.cp_axes", "probes.ranks", "cp_volta", "tc_volta"),
    skip=_skip,
    devices=devices,
    estimate_s=_estimate_s,
)
