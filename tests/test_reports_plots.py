"""Plots: told apart without colour, failures marked, the real sequence lengths on the axis."""

from __future__ import annotations

import pytest

from harness.rows import Row
from reports import plots
from reports.groups import Group, groups
from tests.test_reports_sample import WRONG, failed, row, run, story, sweep


def group(*rows: Row) -> Group:
    (found,) = groups([run(*rows)])
    return found


def texts(figure: object) -> str:
    from matplotlib.text import Text

    return " ".join(t.get_text() for t in figure.findobj(Text))  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["speed", "memory"])
def test_a_plot_is_a_png_and_the_same_every_time(kind: str) -> None:
    some = group(*story())
    first = plots.draw(some, kind)
    assert first.startswith(b"\x89PNG")
    assert first == plots.draw(some, kind)


def test_lines_differ_in_marker_and_style_and_sit_on_the_real_lengths() -> None:
    figure = plots._lines(group(*sweep(("math", "xformers", "flash"), ("none", "model"))), "speed")
    (ax,) = figure.axes
    lines = [line for line in ax.get_lines() if len(line.get_xdata()) > 2]
    assert len({(line.get_marker(), line.get_color()) for line in lines}) == len(lines) == 6
    assert len({line.get_marker() for line in lines}) == 6
    assert list(ax.get_xticks()) == [1024, 2048, 4096, 8192]
    assert "8,192" in texts(figure)


def test_many_modes_are_split_into_panels_with_one_legend() -> None:
    figure = plots._lines(group(*sweep()), "memory")
    assert [ax.get_title(loc="left") for ax in figure.axes] == [
        "compile none",
        "compile mlp",
        "compile layers",
        "compile model",
    ]
    assert len(figure.legends) == 1


def test_a_cell_that_failed_is_a_marked_absence() -> None:
    figure = plots._lines(group(*sweep(("math", "flash"), ("none",))), "speed")
    assert "math: oom" in texts(figure)


def test_a_wrong_result_is_crossed_out() -> None:
    figure = plots._lines(group(row(), row(seq=2048, parity=WRONG)), "speed")
    assert "result is wrong" in texts(figure)


def test_one_length_makes_bars_with_their_values() -> None:
    rows = (row(), row(attention="flash", parity=WRONG), failed("oom", "no", attention="cudnn"))
    figure = plots._bars(group(*rows), "speed")
    assert all(word in texts(figure) for word in ("3,000", "(wrong result)", "✕ oom"))
