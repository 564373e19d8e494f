"""Is each collective right on this machine, and how fast is it?

Declared here without torch. Axes:

kind        rotate: each rank to the next, as the ring does. all_to_all: as Ulysses does. all_reduce, all_gather,
            reduce_scatter: as gradients and sharded weights do
cp_size     ranks
mib         of the tensor that a rank holds (all_gather: that all hold in the end)
dtype       of its elements
backend     auto: nccl with a GPU for each rank, gloo on a CPU. gloo on CUDA: all ranks on one GPU
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from harness.cells import Axes, Device, Measure, Probe
from probes.cp_axes import backend_on


class CollectiveAxes(Axes, frozen=True, kw_only=True):
    """One collective; see the module."""

    kind: Literal["rotate", "all_to_all", "all_reduce", "all_gather", "reduce_scatter"] = "all_to_all"
    cp_size: Annotated[int, msgspec.Meta(ge=2)] = 2
    mib: Annotated[float, msgspec.Meta(gt=0)] = 16.0
    dtype: Literal["fp32", "fp16", "bf16"] = "fp16"
    backend: Literal["auto", "gloo"] = "auto"

    def backend_on(self, device: str) -> str:
        """What moves the tensors."""
        return backend_on(self.backend, device)


def _devices(axes: Axes) -> int:
    assert isinstance(axes, CollectiveAxes)
    return 1 if axes.backend == "gloo" else axes.cp_size


def _skip(axes: Axes, device: Device) -> str:
    return ""


def _estimate_s(axes: Axes, device: Device, measure: Measure) -> float:
    assert isinstance(axes, CollectiveAxes)
    rate = 2e8 if axes.backend_on(device) == "gloo" else 1e10
    return 2.0 + (measure.steps + measure.warmup_steps) * axes.mib * 2**20 * axes.cp_size / rate


PROBE = Probe(
    name="collectives",
    question="Is each collective right on this machine, and how fast?",
    axes=CollectiveAxes,
    work="probes.collectives.work:run",
    preload=("torch", "torch.distributed", "probes.collectives.work"),
    ignores=("check", "cache"),
    sources=("probes.collectives", "probes.cp_axes", "probes.ranks", "probes.launched", "cp_volta"),
    skip=_skip,
    devices=_devices,
    ranks=True,
    estimate_s=_estimate_s,
)
