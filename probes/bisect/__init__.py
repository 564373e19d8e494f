"""Which stage of torch.compile makes a cell of the compile matrix wrong, and which pass?

The axes are a cell's. The module's graph is written into the run's folder as a script that depends on torch alone,
and the script, each time in a process of its own, is asked with

    eager -> aot_eager -> aot_eager_decomp_partition -> inductor without cudagraphs -> inductor

Where the first that fails is one that torch's own bisector can look into, it is run on the script as well.
"""

from __future__ import annotations

from harness.cells import Axes, Device, Measure, Probe
from probes.compile_matrix import PROBE as MATRIX
from probes.compile_matrix import MatrixAxes, skip


def _skip(axes: Axes, device: Device) -> str:
    assert isinstance(axes, MatrixAxes)
    if axes.backend != "inductor":
        return "bisecting starts from Inductor and asks every stage itself"
    if axes.second_backward or axes.accumulate > 1 or not axes.set_to_none:
        return "the script takes one forward and backward; a failure over several steps is not in one graph"
    return skip(axes, device)


def _estimate_s(axes: Axes, device: Device, measure: Measure) -> float:
    return 120.0


PROBE = Probe(
    name="bisect",
    question="Which stage of torch.compile, and which pass, makes this cell wrong?",
    axes=MatrixAxes,
    work="probes.bisect.work:run",
    timed=False,
    preload=MATRIX.preload,
    ignores=("warmup_steps", "steps", "check"),
    sources=("probes.bisect", *MATRIX.sources),
    skip=_skip,
    estimate_s=_estimate_s,
)
