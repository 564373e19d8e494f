"""How points are grouped, called, ordered, and held against a baseline."""

from __future__ import annotations

import pytest

from harness.rows import Fact, Row
from reports.groups import Group, groups, label
from reports.points import points
from tests.test_reports_sample import WRONG, failed, row, run, sweep


def only(*rows: Row, **meta: object) -> Group:
    (group,) = groups([run(*rows, **meta)])
    return group


@pytest.mark.parametrize(
    ("axes", "said"),
    [
        ({"attention": "math", "compile": "none"}, "math"),
        ({"attention": "flash", "compile": "layers"}, "flash + compile layers"),
        ({"compile": "none"}, "compile none"),
        ({"attention": "flash", "checkpointing": True, "cp": 4}, "flash + checkpointing + cp 4"),
        ({"fused": False}, "no fused"),
        ({"dtype": "fp16"}, "fp16"),
    ],
)
def test_a_mode_is_called_by_what_is_on(axes: dict[str, Fact], said: str) -> None:
    assert label(axes) == said


def test_modes_stand_in_the_suites_order_and_sequences_in_theirs() -> None:
    group = only(*reversed(sweep(("math", "xformers", "flash"), ("none", "model"))))
    assert list(group.modes()) == [
        "math",
        "math + compile model",
        "xformers",
        "xformers + compile model",
        "flash",
        "flash + compile model",
    ]
    assert [p.axes["seq"] for p in group.modes()["flash"]] == [1024, 2048, 4096, 8192]


def test_without_a_suite_the_baselines_come_first() -> None:
    group = only(*(row(attention=a) for a in ("cudnn", "math", "efficient")), suite_toml="not [toml")
    assert list(group.modes()) == ["math", "cudnn", "efficient"]


def test_what_is_trained_splits_tables_that_are_large_enough() -> None:
    large = [row(dtype=d, seq=s) for d in ("fp16", "fp32") for s in (1024, 2048, 4096)]
    assert [g.fixed["dtype"] for g in groups([run(*large)])] == ["fp16", "fp32"]
    assert list(only(*large[:4]).modes()) == ["fp16", "fp32"]


def test_the_baseline_is_the_suites_else_math_uncompiled_else_the_first() -> None:
    rows = sweep(("math", "flash"), ("none", "model"))
    assert only(*rows).baseline == {"attention": "math", "compile": "none"}
    assert only(*rows, baseline={"attention": "flash"}).baseline == {"attention": "flash"}
    assert only(*rows, baseline={"attention": "gone"}).baseline == {"attention": "math", "compile": "none"}
    assert only(*(row(attention=a) for a in ("xformers", "flash"))).baseline == {"attention": "xformers"}


def test_a_ratio_is_against_the_baseline_at_the_same_other_axes() -> None:
    rows = [row(tok_s=v, attention=a, seq=s) for a, s, v in (("math", 1024, 100), ("flash", 1024, 150), ("math", 2048, 50), ("flash", 2048, 150))]  # fmt: skip
    group = only(*rows)
    said = [group.relative(p, "tokens_per_s") for p in group.points]
    assert said == ["baseline", "baseline", "1.50x", "3.00x"]


@pytest.mark.parametrize(
    ("base", "said"),
    [
        (failed("oom", "no memory"), "– (baseline oom)"),
        (failed("skipped", "why"), "– (baseline skipped)"),
        (row(seq=512), "– (no baseline)"),
    ],
)
def test_a_ratio_without_its_baseline_says_why(base: Row, said: str) -> None:
    group = only(base, row(attention="flash"))
    (flash,) = (p for p in group.points if p.axes["attention"] == "flash")
    assert group.relative(flash, "tokens_per_s") == said


def test_a_wrong_result_has_no_speed_ratio() -> None:
    group = only(row(), row(attention="flash", parity=WRONG))
    assert group.relative(group.points[1], "tokens_per_s") == "– (wrong result)"
    assert group.relative(group.points[1], "peak_bytes", True) == "1.00x"


def test_replicates_are_one_point_with_the_median_of_their_medians() -> None:
    (point,) = points([run(*(row(tok_s=v, steps=9, replicate=i) for i, v in enumerate((990, 1000, 1100))))])
    assert point.tokens_per_s == pytest.approx(1000, rel=0.006)
    assert point.spread == pytest.approx(0.1, abs=0.005)


def test_runs_with_the_same_name_and_day_are_told_apart() -> None:
    found = points([run(row()), run(row())])
    assert [p.axes["run"] for p in found] == ["2026-01-02 03:04 #1", "2026-01-02 03:04 #2"]


def test_ranks_are_the_x_axis_where_they_vary_and_ratios_are_to_one_rank() -> None:
    def cell(mode: str, size: int, seq: int, tok_s: float) -> Row:
        return row(tok_s=tok_s, probe="cp-step", seq=seq, more={"mode": mode, "cp_size": size})

    group = only(
        cell("none", 1, 1024, 100),
        cell("ring", 2, 1024, 150),
        cell("ring", 4, 1024, 200),
        cell("none", 1, 2048, 50),
        cell("ring", 2, 2048, 90),
        baseline={"mode": "none", "cp_size": 1},
    )
    assert (group.x, group.baseline) == ("cp_size", {"mode": "none", "cp_size": 1})
    ratios = {(p.axes["cp_size"], p.axes["seq"]): group.relative(p, "tokens_per_s") for p in group.points}
    assert ratios[4, 1024] == "2.00x"
    assert ratios[2, 2048] == "1.80x"
    assert ratios[1, 2048] == "baseline"
