"""What the probes of several ranks have in common: how a sequence is shared. Imports no torch.

mode        none: one rank, the baseline. ulysses; ring (zigzag shards); ring-contiguous; hybrid: ulysses 2 x a ring
cp_size     ranks that share the sequence
attention   auto, or a kernel of tc_volta
backend     auto: nccl with a GPU for each rank, gloo on a CPU. gloo on CUDA: all ranks on one GPU, which tells right
            from wrong and memory per rank, but no speed
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from harness.cells import Axes, Device


class CpAxes(Axes, frozen=True, kw_only=True):
    """Base of their axes; see the module."""

    mode: Literal["none", "ulysses", "ring", "ring-contiguous", "hybrid"] = "ring"
    cp_size: Annotated[int, msgspec.Meta(ge=1)] = 2
    attention: Literal["auto", "math", "efficient", "xformers", "flash", "cudnn"] = "auto"
    dtype: Literal["fp32", "fp16", "bf16"] = "fp32"
    seq: Annotated[int, msgspec.Meta(ge=2)] = 512
    batch: Annotated[int, msgspec.Meta(ge=1)] = 1
    backend: Literal["auto", "gloo"] = "auto"

    @property
    def ulysses(self) -> int:
        """Ranks that deal the heads out."""
        return {"ulysses": self.cp_size, "hybrid": 2}.get(self.mode, 1)

    @property
    def layout(self) -> str:
        """Of the shards on the ring."""
        return "zigzag" if self.mode in ("ring", "hybrid") else "contiguous"

    def backend_on(self, device: str) -> str:
        """What moves the tensors."""
        return backend_on(self.backend, device)


def backend_on(backend: str, device: str) -> str:
    """nccl, or gloo on a CPU and where it is asked for."""
    return "gloo" if device == "cpu" or backend == "gloo" else "nccl"


def why_not(axes: CpAxes, device: Device, query_heads: int | None) -> str:
    """The reason why this sharing can't be, or ""."""
    parts = axes.cp_size * (2 if axes.layout == "zigzag" else 1)
    reasons = (
        ((axes.mode == "none") != (axes.cp_size == 1), "mode none is cp_size 1, and only that"),
        (
            axes.mode == "hybrid" and (axes.cp_size % 2 > 0 or axes.cp_size < 4),
            "hybrid is 2 x a ring: cp_size 4, 6, …",
        ),
        (axes.seq % parts > 0, f"{axes.seq} tokens do not divide into {parts} parts"),
        (
            query_heads is not None and query_heads < axes.ulysses,
            f"{query_heads} query heads do not serve {axes.ulysses} ranks",
        ),
        (
            device == "cpu" and axes.attention not in ("auto", "math", "flash"),
            f"{axes.attention} is for CUDA",
        ),
    )
    return next((reason for holds, reason in reasons if holds), "")


def devices(axes: Axes) -> int:
    """A GPU for each rank, or one for all over gloo."""
    assert isinstance(axes, CpAxes)
    return 1 if axes.backend == "gloo" else axes.cp_size


def shared_note(axes: CpAxes, device: str) -> str:
    """`sharing_note` of these axes."""
    return sharing_note(axes.backend, device, axes.cp_size)


def sharing_note(backend: str, device: str, ranks: int) -> str:
    """What a reader must know of ranks that share a device, or ""."""
    if ranks == 1 or backend_on(backend, device) == "nccl":
        return ""
    if device == "cpu":
        return f"{ranks} ranks share one CPU: nothing is gained by them here"
    return f"emulated: {ranks} ranks share one GPU over gloo; memory is per rank, time means nothing"
