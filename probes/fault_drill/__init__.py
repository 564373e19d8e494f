"""Does the harness keep its promises when a cell misbehaves? The axis is the fault."""

from __future__ import annotations

from typing import Literal

from harness.cells import Axes, Device, Measure, Probe

Fault = Literal[
    "none",
    "raise",
    "raise-multiline",
    "exit-3",
    "exit-0",
    "segv-before",
    "segv-after",
    "sigkill",
    "oom-host",
    "oom-device",
    "sleep",
    "print",
    "ignore-term",
    "nan",
    "huge-result",
    "fork",
    "daemon",
    "shared-memory",
    "garbage-result",
]


class FaultAxes(Axes, frozen=True, kw_only=True):
    """One fault; `n` multiplies cells."""

    fault: Fault
    n: int = 0


def _skip(axes: Axes, device: Device) -> str:
    assert isinstance(axes, FaultAxes)
    if axes.fault == "oom-device" and device == "cpu":
        return "device memory runs out only where there is a device"
    return ""


def _estimate(axes: Axes, device: Device, measure: Measure) -> float:
    assert isinstance(axes, FaultAxes)
    if axes.fault in ("sleep", "print"):
        return measure.timeout_s
    return measure.timeout_s + measure.grace_s if axes.fault == "ignore-term" else 0.05


PROBE = Probe(
    name="fault-drill",
    question="Does every fault of a cell end in one row with the right status, and leave nothing behind?",
    axes=FaultAxes,
    work="probes.fault_drill.work:run",
    timed=False,
    preload=("probes.fault_drill.work",),
    sources=("probes.fault_drill",),
    skip=_skip,
    estimate_s=_estimate,
)
