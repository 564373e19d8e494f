"""Which attention kernels are usable here, and why not the others."""

from __future__ import annotations

from probes.doctor.report import Line

TITLE = "attention kernels"


def lines() -> list[Line]:
    return []
