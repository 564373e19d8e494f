"""Plots of one group: a value over sequence length, one line per mode; bars where there is one length.

Readable without colour (markers and line styles differ) and on a dark page (an opaque white card).
A cell that failed is a marked absence, never a gap.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from harness.rows import Fact
from reports.groups import RANKS, Group, label
from reports.points import Point
from reports.text import one_line, significant

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette: told apart by colour-blind readers too. Yellow is left out: it is faint on white.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#56B4E9", "#E69F00", "#7F7F7F")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_STYLES = ("-", "--", "-.", ":")
_MOST_LINES = 8  # in one panel; more are split into panels
_WRONG = "result is wrong"
_TITLES = {"speed": "tokens per second", "memory": "peak memory, GiB"}


def draw(group: Group, kind: str) -> bytes:
    """A PNG of `kind` ("speed" or "memory") for the group."""
    with rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = _lines(group, kind) if group.x else _bars(group, kind)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=144, facecolor="white", metadata={"Software": None})
    return buffer.getvalue()


def _value(point: Point, kind: str) -> float | None:
    if point.status != "ok":
        return None
    if kind == "speed":
        return point.tokens_per_s
    return None if point.peak_bytes is None else point.peak_bytes / 2**30


def _panels(group: Group) -> tuple[dict[str, dict[str, list[Point]]], str]:
    """Panel title -> line label -> points. One panel, unless it would hold too many lines."""
    modes = group.modes()
    if len(modes) <= _MOST_LINES or len(group.mode_axes) < 2:
        return {"": modes}, ""
    axis = _panel_axis(group, len(modes))
    rest = [a for a in group.mode_axes if a != axis]
    panels: dict[str, dict[str, list[Point]]] = {}
    for some in modes.values():
        own: Mapping[str, Fact] = {axis: some[0].axes.get(axis)}
        line = label({a: some[0].axes.get(a) for a in rest})
        panels.setdefault(label(own), {})[line] = some
    return panels, axis


def _panel_axis(group: Group, modes: int) -> str:
    """The axis with the fewest values that leaves few enough lines in each panel."""
    sizes = {axis: len({p.axes.get(axis) for p in group.points}) for axis in group.mode_axes}
    enough = [axis for axis in sizes if modes / sizes[axis] <= _MOST_LINES]
    return min(enough, key=lambda a: sizes[a]) if enough else max(sizes, key=lambda a: sizes[a])


def _lines(group: Group, kind: str) -> Figure:
    panels, _ = _panels(group)
    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    columns = min(2 if len(panels) == 4 else 3, len(panels))
    rows = -(-len(panels) // columns)
    if len(panels) == 1:
        size = (7.6, max(4.2, 0.21 * len(names) + 0.5))
    else:
        wide = max(7.6, 3.2 * columns + 0.6)
        size = (wide, 2.7 * rows + 0.3 + 0.22 * -(-len(names) // _legend_columns(names, wide)))
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    axes: list[Axes] = list(grid.flat)
    ticks = sorted({float(str(p.axes[group.x])) for p in group.points if p.status != "skipped"})
    top = max((v for p in group.points if (v := _value(p, kind)) is not None), default=1.0) * 1.08
    failed = any(p.status not in ("ok", "skipped") for p in group.points)
    for ax, (title, lines) in zip(axes, panels.items(), strict=False):
        _scales(ax, ticks, top, failed)
        _panel(ax, title, lines, names, group.x, kind)
    _outer_labels(axes, len(panels), columns, group.x)
    _legend(figure, axes[: len(panels)], names)
    figure.supylabel(_axis_title(group, kind), fontsize=10)
    return figure


def _axis_title(group: Group, kind: str) -> str:
    return "peak resident set, GiB" if kind == "memory" and group.device == "cpu" else _TITLES[kind]


def _panel(
    ax: Axes, title: str, lines: Mapping[str, Sequence[Point]], names: Sequence[str], x: str, kind: str
) -> None:
    ax.set_title(one_line(title, 40), fontsize=9.5, loc="left")
    lost: dict[float, list[tuple[str, str]]] = {}
    for name, some in lines.items():
        style = _style(names.index(name))
        shown = [(float(str(p.axes[x])), v, p) for p in some if (v := _value(p, kind)) is not None]
        ax.plot([s[0] for s in shown], [s[1] for s in shown], label=name, **style)
        for at, value, point in shown:
            _doubt(ax, at, value, point, kind, str(style["color"]))
        for point in some:
            if point.status != "ok":
                lost.setdefault(float(str(point.axes[x])), []).append((name, point.status))
    for i, (at, some_lost) in enumerate(sorted(lost.items())):
        _absent(
            ax, at, some_lost, names, words_at=0.045 if i % 2 else 0.085
        )  # neighbours' words do not collide


def _style(i: int) -> dict[str, Any]:
    """Colour, marker and line of the i-th line; no two of 32 agree in all three."""
    lap = i // len(_COLOURS)
    return {
        "color": _COLOURS[i % len(_COLOURS)],
        "marker": _MARKERS[(i + lap) % len(_MARKERS)],
        "linestyle": _STYLES[(i + lap) % len(_STYLES)],
        "linewidth": 1.6,
        "markersize": 5.5,
        "markeredgecolor": "white",
        "markeredgewidth": 0.6,
    }


def _doubt(ax: Axes, at: float, value: float, point: Point, kind: str, colour: str) -> None:
    """The range between processes, and a cross through a wrong result."""
    if kind == "speed" and len(point.medians_s) > 1 and point.step_s:
        low, high = (value * point.step_s / m for m in (max(point.medians_s), min(point.medians_s)))
        ax.vlines(at, low, high, color=colour, linewidth=1.2)
    if kind == "speed" and point.wrong:
        ax.plot(
            [at],
            [value],
            label=_WRONG,
            marker="x",
            markersize=12,
            markeredgewidth=2,
            color="#c00000",
            linestyle="",
        )


def _absent(
    ax: Axes, at: float, lost: Sequence[tuple[str, str]], names: Sequence[str], words_at: float
) -> None:
    """Crosses below the zero line, in the lines' colours, with how the cells ended."""
    step = 0.1 / max(2, len(lost))
    for i, (name, _) in enumerate(lost):
        height = 0.015 + step * (i + 0.5)
        ax.plot(
            [at],
            [height],
            marker="x",
            color=_COLOURS[names.index(name) % len(_COLOURS)],
            markersize=5,
            linestyle="",
            transform=ax.get_xaxis_transform(),
            clip_on=False,
        )
    if len(lost) <= 2:
        words = [f"{one_line(name, 40)}: {status}" for name, status in reversed(lost)]
    else:
        words = [f"{len(lost)} modes: {', '.join(dict.fromkeys(status for _, status in lost))}"]
    low, high = ax.get_xlim()
    left = at < (low * high) ** 0.5  # text on the side that has room
    ax.annotate(
        "\n".join(words),
        (at, words_at),
        xycoords=ax.get_xaxis_transform(),
        xytext=(6 if left else -6, 0),
        textcoords="offset points",
        ha="left" if left else "right",
        va="center",
        fontsize=7.5,
        color="#444444",
    )


def _scales(ax: Axes, ticks: Sequence[float], top: float, failed: bool) -> None:
    ax.set_xscale("log", base=2)
    ax.set_xticks(ticks, [f"{t:,.0f}" for t in ticks], rotation=30 if len(ticks) > 5 else 0)
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xlim(ticks[0] / 1.3, ticks[-1] * 1.3)
    ax.set_ylim(-0.13 * top if failed else 0, top)
    ax.yaxis.set_major_locator(MaxNLocator(5, prune=None))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.10g}" if v >= 0 else ""))
    if failed:
        ax.axhline(0, color="#999999", linewidth=0.8)
    ax.grid(axis="y", color="#e4e4e4", linewidth=0.7)
    ax.set_axisbelow(True)


def _outer_labels(axes: Sequence[Axes], panels: int, columns: int, x: str) -> None:
    """The x axis is written below the lowest panel of each column; empty places go."""
    for i, ax in enumerate(axes):
        if i >= panels:
            ax.remove()
        elif i + columns >= panels:
            ax.set_xlabel("ranks" if x == RANKS else f"{x}, tokens")
            ax.tick_params(labelbottom=True)


def _legend_word(name: str) -> str:
    return one_line(name, 44)


def _legend_columns(names: Sequence[str], inches: float) -> int:
    """How many names stand beside each other in a figure of this width."""
    longest = max(len(_legend_word(name)) for name in names) + 9  # with the line drawn before it
    return max(1, min(len(names), int(12.5 * inches / longest)))


def _legend(figure: Figure, axes: Sequence[Axes], names: Sequence[str]) -> None:
    found = {
        name: handle for ax in axes for handle, name in zip(*ax.get_legend_handles_labels(), strict=True)
    }
    shown = [name for name in (*names, _WRONG) if name in found]
    words = [_legend_word(name) for name in shown]
    place: dict[str, Any] = {"loc": "outside right upper"}
    if len(axes) > 1:
        place = {"loc": "outside lower center", "ncols": _legend_columns(shown, figure.get_figwidth())}
    figure.legend([found[name] for name in shown], words, frameon=False, handlelength=3.2, **place)


def _bars(group: Group, kind: str) -> Figure:
    modes = {name: some[0] for name, some in group.modes().items()}
    figure = Figure(figsize=(7.6, 0.9 + 0.27 * len(modes)), layout="constrained")
    ax = figure.subplots()
    values = [_value(point, kind) for point in modes.values()]
    top = max((v for v in values if v is not None), default=1.0)
    for i, (point, value) in enumerate(zip(modes.values(), values, strict=True)):
        hatch = "////" if point.wrong else ""
        ax.barh(
            i,
            value or 0,
            height=0.68,
            color="white" if point.wrong else "#0072B2",
            edgecolor="#0072B2",
            hatch=hatch,
        )
        text = _bar_text(point, value)
        ax.text((value or 0) + top * 0.01, i, text, va="center", fontsize=8, color="#222222")
    ax.set_yticks(range(len(modes)), [one_line(name or "all", 48) for name in modes])
    ax.set_ylim(len(modes) - 0.4, -0.6)
    ax.set_xlim(0, top * (1.32 if any(point.wrong for point in modes.values()) else 1.18))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.10g}"))
    ax.grid(axis="x", color="#e4e4e4", linewidth=0.7)
    ax.set_axisbelow(True)
    ax.set_xlabel(_axis_title(group, kind))
    return figure


def _bar_text(point: Point, value: float | None) -> str:
    if value is None:
        return f"✕ {point.status}" if point.status != "ok" else "n/a"
    return significant(value) + (" (wrong result)" if point.wrong else "")
