"""Does what the compiler makes for Volta compute right values? The compile matrix, lowered as for sm_70, on any GPU.

Declared here without torch. A cell is one of compile-matrix, with TRITON_OVERRIDE_ARCH set in its process: Triton
then takes Volta's path through its passes (layouts, dots as scalar FMA, emulated bf16) and assembles what comes out
for the card that is here. This is an emulation, and every table of it says so: it checks Volta's path of the
compiler, not Volta's hardware; Inductor's own gates and cuBLAS stay those of the real card. The cell reads back from
Triton's cache for which card each kernel was lowered, and is `unsupported` where one was not.

The axes are compile-matrix's, and `arch`: sm70, or sm75 for Turing.
"""

from __future__ import annotations

from typing import Literal

from harness.cells import Axes, Device, Measure, Probe
from probes import compile_matrix
from probes.compile_matrix import MatrixAxes


class VoltaAxes(MatrixAxes, frozen=True, kw_only=True):
    """One cell of the matrix, lowered for another card; see the module."""

    arch: Literal["sm70", "sm75"] = "sm70"


def skip(axes: Axes, device: Device) -> str:
    """What has no Triton kernel to lower, with the reason; and what compile-matrix leaves out."""
    assert isinstance(axes, VoltaAxes)
    if device == "cpu":
        return "on a CPU Inductor writes C++, and there is nothing for Triton to lower; triton-lowering needs no GPU"
    if axes.backend != "inductor":
        return f"backend {axes.backend} generates no code"
    return compile_matrix.skip(axes, device)


def _estimate_s(axes: Axes, device: Device, measure: Measure) -> float:
    return 1.5 * compile_matrix.PROBE.estimate_s(axes, device, measure)


PROBE = Probe(
    name="volta-lowering",
    question="Emulated: do modules compiled as for sm_70 compute right outputs and gradients, in which mode and dtype?",
    axes=VoltaAxes,
    work="probes.volta_lowering.work:run",
    preload=(*compile_matrix.PROBE.preload, "probes.volta_lowering.work"),
    ignores=compile_matrix.PROBE.ignores,
    sources=(*compile_matrix.PROBE.sources, "probes.volta_lowering", "probes.triton_lowering.assembly"),
    skip=skip,
    estimate_s=_estimate_s,
)
