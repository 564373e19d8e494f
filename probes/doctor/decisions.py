"""What tc_volta decides for this device, with its reasons."""

from __future__ import annotations

from probes.doctor.report import Line

TITLE = "decisions of tc_volta"


def lines() -> list[Line]:
    return []
