"""Which ways of sharing a sequence does a model allow, what does each send and hold, and which is to be preferred?

No device is needed, and none is used but to ask its name and links. Declared here without torch. Axes:

model           a preset of probes.models, or the path of a local checkpoint folder
seq, batch      of the whole sequence
cp_size         ranks that share it
dtype           of what travels
checkpointing   layers are computed again in backward, and send again
card            the name of a card as CUDA reports it; "": the one that is here, else V100 SXM2 (assumed)
link_gb_s       GB/s that one rank sends to the next; 0: from the topology that is here, else PCIe 3.0 x16 (assumed)
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from harness.cells import Axes, Device, Measure, Probe
from probes.models import check_name


class CpPlanAxes(Axes, frozen=True, kw_only=True):
    """One job to be shared; see the module."""

    model: str
    seq: Annotated[int, msgspec.Meta(ge=2)] = 32_768
    batch: Annotated[int, msgspec.Meta(ge=1)] = 1
    cp_size: Annotated[int, msgspec.Meta(ge=2)] = 4
    dtype: Literal["fp32", "fp16", "bf16"] = "fp16"
    checkpointing: bool = True
    card: str = ""
    link_gb_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0

    def __post_init__(self) -> None:
        check_name(self.model)


def _skip(axes: Axes, device: Device) -> str:
    return ""


def _estimate_s(axes: Axes, device: Device, measure: Measure) -> float:
    return 0.5


PROBE = Probe(
    name="cp-plan",
    question="Which context-parallel modes does a model allow, what do they cost, and which is to be preferred?",
    axes=CpPlanAxes,
    work="probes.cp_plan.work:run",
    timed=False,
    preload=("probes.cp_plan.work",),
    ignores=("warmup_steps", "steps", "check", "cache"),
    sources=("probes.cp_plan", "probes.fit", "probes.models", "probes.peaks", "probes.links", "cp_volta"),
    skip=_skip,
    estimate_s=_estimate_s,
)
