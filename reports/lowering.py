"""What Triton made of each kernel, as a table: one line per cell. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from harness.rows import Row
from reports.text import NONE, markdown, one_line

COLUMNS = (
    *("kernel", "dtype", "size", "target", "Triton", "outcome", "dots"),
    *("registers", "spill B", "shared B", "of", "bf16 instr.", "cubin B"),
)
_NUMERIC = COLUMNS[-6:]
_LONGEST = 160  # of an outcome in words; the row has the whole text


def lines(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """One tuple of words per row, as COLUMNS."""
    return [_line(row) for row in rows]


def table(rows: Sequence[Row]) -> str:
    """The table as Markdown."""
    head = f"| {' | '.join(COLUMNS)} |"
    rule = "|" + "".join("--:|" if name in _NUMERIC else ":--|" for name in COLUMNS)
    return "\n".join([head, rule, *(f"| {' | '.join(map(markdown, line))} |" for line in lines(rows))])


def pivot(rows: Sequence[Row], by: Sequence[str], across: Sequence[str]) -> str:
    """One line per value of the axes `by`, one column per value of the axes `across`; each cell in few words."""
    down = list(dict.fromkeys(_key(row, by) for row in rows))
    heads = list(dict.fromkeys(_key(row, across) for row in rows))
    cells = {(_key(row, by), _key(row, across)): _short(row) for row in rows}
    head = f"| {' '.join(by)} | {' | '.join(map(markdown, heads))} |"
    lines = [
        f"| {markdown(name)} | {' | '.join(markdown(cells.get((name, one), NONE)) for one in heads)} |"
        for name in down
    ]
    return "\n".join([head, "|" + ":--|" * (len(heads) + 1), *lines])


def _key(row: Row, axes: Sequence[str]) -> str:
    return " ".join(str(row.axes.get(axis, "")) for axis in axes)


def _short(row: Row) -> str:
    if row.status != "ok":
        return row.status
    dots = str(row.facts.get("dots", "")).partition(":")[0]
    spilled = _sum(row.facts.get("spill_store_bytes"), row.facts.get("spill_load_bytes"))
    words = ["compiles" if dots in ("", "no dot") else dots]
    return ", ".join([*words, f"spills {spilled:,} B"] if spilled else words)


def _line(row: Row) -> tuple[str, ...]:
    facts = row.facts
    asked = row.axes.get("triton")
    spilled = _sum(facts.get("spill_store_bytes"), facts.get("spill_load_bytes"))
    return (
        str(row.axes.get("kernel", "")).rsplit("/", 1)[-1],
        str(row.axes.get("dtype", "")),
        str(row.axes.get("size") or NONE),
        str(row.axes.get("target", "")),
        str(facts.get("triton") or (asked if asked != "installed" else NONE)),
        _outcome(row),
        str(facts.get("dots", NONE)),
        _number(facts.get("registers")),
        _number(spilled),
        _number(facts.get("shared_bytes")),
        _number(facts.get("shared_limit_bytes")),
        _number(facts.get("bf16_instructions")),
        _number(facts.get("cubin_bytes")),
    )


def _outcome(row: Row) -> str:
    if row.status == "ok":
        return row.verdict or "ok"
    return one_line(f"{row.status}: {row.reason}", _LONGEST)


def _sum(*values: object) -> int | None:
    known = [value for value in values if isinstance(value, int)]
    return sum(known) if known else None


def _number(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else NONE
