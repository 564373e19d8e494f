"""What does Triton make of a kernel for a given card? Compiled offline: no GPU is needed, and none is touched.

Declared here without torch or Triton. One cell is one kernel for one target, compiled by a process of its own, so a
compiler that aborts is a row with its last words. Axes:

kernel     pointwise, reduction, dot, dot_reduce, attention (built in); FILE.py::NAME; or a .ttir file of a Triton
           cache. `--file PATH` names every kernel of a Python file with SIGNATURES (see builtin.py) or of a cache
target     sm_70 (Volta), sm_75, sm_80, sm_90
dtype      of a kernel whose signature leaves it open; "own" for any other
size       K of the dots, the head dimension of the attention, a sixteenth of the other blocks; 0 for a kernel whose signature leaves none open
num_warps  of a block; 0 takes the kernel's own, or Triton's default of 4
triton     installed; or a version, taken from .triton/VERSION:
           python -m pip install --no-deps --target .triton/3.2.0 triton==3.2.0

Verdict: ok; caveat where a dot that the card has a matrix instruction for is scalar, or where registers spill.
Status:  error with the compiler's words where it refuses; crashed where it aborts; unsupported where the kernel needs
more shared memory than the target has, or there is no Triton to ask. Nothing is run, so nothing is said of values.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from harness.cells import Axes, AxisValue, Device, FromFile, Measure, Probe
from probes.triton_lowering import sources


class LoweringAxes(Axes, frozen=True, kw_only=True):
    """One kernel for one target; see the module."""

    kernel: str
    target: Literal["sm_70", "sm_75", "sm_80", "sm_90"] = "sm_70"
    dtype: Literal["fp16", "bf16", "fp32", "own"] = "own"
    size: Annotated[int, msgspec.Meta(ge=0, le=1024)] = 0
    num_warps: Literal[0, 1, 2, 4, 8, 16, 32] = 0
    triton: Annotated[str, msgspec.Meta(pattern=r"^(installed|\d+\.\d+\.\d+)$")] = "installed"

    def __post_init__(self) -> None:
        sources.find(self.kernel)


def skip(axes: Axes, device: Device) -> str:
    """A dtype or size that the kernel's signature does not take, or that it lacks."""
    assert isinstance(axes, LoweringAxes)
    kernel = sources.find(axes.kernel)
    reasons = (
        (
            kernel.leaves_open("dtype") and axes.dtype == sources.OWN,
            "its signature leaves the dtype open: give dtype=fp16, bf16 or fp32",
        ),
        (
            not kernel.leaves_open("dtype") and axes.dtype != sources.OWN,
            f"its signature names its types: dtype={axes.dtype} would change nothing",
        ),
        (
            kernel.leaves_open("size") and not axes.size,
            "its signature leaves the size open: give size=64, say",
        ),
        (
            not kernel.leaves_open("size") and bool(axes.size),
            f"its signature has no size: size={axes.size} would change nothing",
        ),
    )
    return next((reason for holds, reason in reasons if holds), "")


def names(path: Path | None) -> list[str]:
    """The kernels of a file or folder, or the built-in ones. Raises ValueError."""
    return sources.builtin_names() if path is None else [kernel.called for kernel in sources.listed(path)]


def open_axes(name: str) -> dict[str, list[AxisValue]]:
    """The axes that this kernel leaves open, and what they are tried with. Raises ValueError for an unknown name."""
    kernel = sources.find(name)
    tried: dict[str, list[AxisValue]] = {"dtype": ["fp16", "bf16", "fp32"], "size": [64]}
    return {axis: values for axis, values in tried.items() if kernel.leaves_open(axis)}


def left_out(path: Path) -> str:
    """What of the file is not lowered, and why; empty where nothing is left out."""
    some = sources.without_signature(path)
    return f"not lowered, since SIGNATURES has no line for it: {', '.join(some)}" if some else ""


def _estimate_s(axes: Axes, device: Device, measure: Measure) -> float:
    assert isinstance(axes, LoweringAxes)
    return 8.0 if axes.kernel == "attention" and axes.target < "sm_80" else 2.5


PROBE = Probe(
    name="triton-lowering",
    question="Does Triton compile these kernels for this target, with tensor cores or without, and at what cost?",
    axes=LoweringAxes,
    work="probes.triton_lowering.work:run",
    timed=False,
    ignores=("warmup_steps", "steps", "check", "cache"),
    from_file=FromFile(axis="kernel", names=names, open_axes=open_axes, left_out=left_out),
    sources=("probes.triton_lowering",),
    skip=skip,
    estimate_s=_estimate_s,
)
