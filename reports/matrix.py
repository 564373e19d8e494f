"""The compile matrix as a table: one line per cell, what went wrong below it with the log's last lines. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from harness.rows import Row
from reports.text import markdown as escaped

COLUMNS = ("model", "mode", "dtype", "output", "grad", "verdict", "compile s", "peak MiB", "eager MiB")
_KEYS = ("model", "mode", "dtype")
_LOG_LINES = 5
# Stands above every table of volta-lowering, whatever its rows say.
EMULATION = (
    "Emulation: kernels lowered by Triton as for sm_70, assembled for and run on another card. It checks the "
    "compiler's path for Volta, not Volta's hardware; Inductor's gates and cuBLAS are those of the card that ran."
)


def label(probe: str) -> str:
    """What a reader of this probe's table must know first; empty for measurements of the card itself."""
    return EMULATION if probe == "volta-lowering" else ""


def lines(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """One tuple of words per row, as COLUMNS; skipped cells say why in their verdict."""
    also = varying(rows)
    return [_line(row, also) for row in rows]


def varying(rows: Sequence[Row]) -> tuple[str, ...]:
    """The other axes in which these rows differ; they stand beside the module's name."""
    axes = rows[0].axes if rows else {}
    return tuple(a for a in axes if a not in _KEYS and any(row.axes.get(a) != axes[a] for row in rows))


def markdown(rows: Sequence[Row]) -> str:
    """The table and, below it, one paragraph for each cell that is not plainly right."""
    ordered = list(rows)
    said = label(rows[0].probe) if rows else ""
    head = [*([said, ""] if said else []), f"| {' | '.join(COLUMNS)} |", "|" + ":--|" * 6 + "--:|" * 3]
    body = [f"| {' | '.join(escaped(word) for word in line)} |" for line in lines(ordered)]
    legend = "output, grad: the verdict, and the largest error against float64 with eager's own in brackets."
    return "\n".join(
        [*head, *body, "", legend, "", *(note for row in ordered for note in _note(row, varying(ordered)))]
    )


def _line(row: Row, also: tuple[str, ...]) -> tuple[str, ...]:
    facts = row.facts
    seconds = facts.get("compile_s")
    return (
        " ".join([str(row.axes.get("model", "")), *(f"{a}={row.axes.get(a)}" for a in also)]),
        str(row.axes.get("mode", "")),
        str(row.axes.get("dtype", "")),
        str(facts.get("output", "")),
        str(facts.get("grad", "")),
        (row.verdict or "ok") if row.status == "ok" else row.status,
        f"{seconds:.1f}" if isinstance(seconds, float) else "",
        _mib(facts.get("compiled_peak_bytes")),
        _mib(facts.get("eager_peak_bytes")),
    )


def _note(row: Row, also: tuple[str, ...]) -> list[str]:
    if row.status == "ok" and row.verdict == "ok":
        return []
    where = " ".join(f"{k}={row.axes[k]}" for k in (*_KEYS, *also) if k in row.axes)
    found = [f"- {where}: {escaped(row.reason or row.verdict_reason)}"]
    if row.log_tail:
        found += ["", *(f"      {line}" for line in row.log_tail[-_LOG_LINES:]), ""]
    return found


def _mib(value: object) -> str:
    return f"{value / (1 << 20):,.0f}" if isinstance(value, int) else ""
