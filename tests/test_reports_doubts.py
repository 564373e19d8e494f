"""Each way in which a number may not be what it looks like is marked, with the reason."""

from __future__ import annotations

from typing import Any

import pytest

from harness.rows import AttentionReport, CompileReport, DeviceState, GraphBreak, Isolation, Parity, Row
from reports.doubts import doubts
from reports.points import points
from tests.test_reports_sample import WRONG, failed, row, run


def tags(*rows: Row) -> dict[str, str]:
    (point,) = points([run(*rows)])
    return {doubt.tag: doubt.text for doubt in doubts(point)}


def test_a_good_row_raises_no_doubt() -> None:
    assert tags(row(replicate=0), row(replicate=1)) == {}


@pytest.mark.parametrize(
    ("changes", "tag", "says"),
    [
        ({"parity": WRONG}, "WRONG RESULT", "3 of 338 gradients"),
        ({"parity": Parity(verdict="nonfinite", reason="NaN in loss")}, "WRONG RESULT", "NaN in loss"),
        ({"parity": Parity(verdict="no_reference", reason="float64 did not fit")}, "unchecked", "did not fit"),
        ({"parity": Parity(verdict="caveat", reason="float32 reference")}, "caveat", "float32"),
        ({"parity": None}, "unchecked", "measure.check"),
        ({"step_s": ()}, "no samples", "no step times"),
        ({"step_s": (1.0,)}, "few samples", "only 1 timed step in"),
        ({"step_s": (1.0, 1.0)}, "few samples", "only 2 timed steps"),
        ({"step_s": (1.0, 1.0, 1.0)}, "few samples", "only 3"),
        ({"step_s": (1.0,) * 8 + (None,), "nulls": {"step_s[8]": "NaN"}}, "lost samples", "1 of 9 step times are n/a (NaN)"),
        ({"step_s": (1.0, 1.0, 1.0, 1.05, 1.1, 1.2)}, "drift", "slower"),
        ({"step_s": (1.2, 1.2, 1.0, 1.0, 1.0, 1.0)}, "drift", "warmup_steps"),
        ({"step_s": (1.0, 1.4) * 5}, "unsteady", "interquartile"),
        ({"device_after": DeviceState(throttle_reasons=("hw_slowdown",))}, "throttled", "hw_slowdown"),
        ({"device_before": DeviceState(foreign_processes=("9 x 1",))}, "shared GPU", "9 x 1"),
        ({"isolation": Isolation(method="spawn", neighbours=("c",))}, "neighbours", "same time"),
        ({"compiled": CompileReport(asked="model", fallbacks=("why",))}, "fell back", "not what ran"),
        ({"compiled": CompileReport(asked="model", graph_breaks=(GraphBreak(reason="print"),))}, "graph breaks", "print"),
        ({"compiled": CompileReport(asked="model", recompiles=("shape",))}, "recompiled", "shape"),
        ({"kernel": AttentionReport(asked="flash", ran="math", honoured=False)}, "other kernel", "math ran"),
        ({"loss": (1.0, None), "nulls": {"loss[1]": "NaN"}}, "loss n/a", "loss is n/a (NaN)"),
        ({"notes": ("emulated",)}, "note", "emulated"),
        ({"flops_per_step": 1e15, "peak_flops_per_s": 1e12}, "implausible MFU", "above 100 %"),
    ],
)  # fmt: skip
def test_a_doubtful_number_says_why(changes: dict[str, Any], tag: str, says: str) -> None:
    found = tags(row(**changes))
    assert says in found[tag]


def test_an_idle_gpu_before_the_start_is_no_throttling() -> None:
    assert tags(row(device_before=DeviceState(throttle_reasons=("gpu_idle",)))) == {}


def test_processes_that_differ_are_doubtful() -> None:
    assert "differ by 11 %" in tags(row(tok_s=3000, replicate=0), row(tok_s=3350, replicate=1))["spread"]


def test_one_process_that_failed_among_others_is_named() -> None:
    found = tags(row(replicate=0), failed("crashed", "SIGSEGV", replicate=1))
    assert found["partly failed"] == "1 of 2 processes did not end well (crashed: SIGSEGV)"


def test_processes_from_two_environments_are_doubtful() -> None:
    assert "mixed" in tags(row(replicate=0), row(replicate=1, environment="e2"))


def test_a_failed_cell_has_no_number_to_doubt() -> None:
    assert tags(failed("oom", "no")) == {}
