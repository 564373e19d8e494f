"""What was found when claims were checked: rows held against them, and the last result of each in a file. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from harness.errors import HarnessError
from harness.rows import Row
from reports.claims import Check, Value
from reports.load import Run, load_run
from reports.points import device_name, points
from reports.text import count, significant

SCHEMA = 1
FILE = "results/verify.json"
_SHOWN = ("torch", "triton", "transformers", "xformers")
How = Literal["command", "rows"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One claim, checked once."""

    holds: bool
    how: How
    detail: str  # what was seen
    at: str  # UTC date
    device: str
    versions: str
    seconds: float = 0.0


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """The last finding of each claim."""

    schema: int = SCHEMA
    results: dict[str, Finding] = {}


def read(path: Path) -> Findings:
    """The file, or nothing where there is none. Raises HarnessError for a file that is none of ours."""
    if not path.is_file():
        return Findings()
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Findings)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise HarnessError(f"{path}: is no file of findings: {error}") from error
    if found.schema != SCHEMA:
        raise HarnessError(f"{path}: schema {found.schema}; this program reads schema {SCHEMA}")
    return found


def encode(found: Findings) -> bytes:
    """The file's content, in the order of the claims' names."""
    ordered = msgspec.structs.replace(found, results=dict(sorted(found.results.items())))
    return msgspec.json.format(msgspec.json.encode(ordered), indent=1) + b"\n"


def in_rows(check: Check, folder: Path, how: How = "rows") -> Finding:
    """Whether the rows of the run in `folder` show what the claim says. Raises HarnessError for no run there."""
    run = load_run(folder)
    rows = [row for row in run.rows if _matches(row, check.where)]
    at, device, versions = _origin(run, rows)
    holds, detail = _judged(check, run, rows)
    return Finding(holds=holds, how=how, detail=detail, at=at, device=device, versions=versions)


def outcome(row: Row) -> str:
    """The verdict of a cell that ended well, the status of any other."""
    return row.status if row.status != "ok" else row.verdict or "ok"


def _judged(check: Check, run: Run, rows: Sequence[Row]) -> tuple[bool, str]:
    if not rows:
        return False, f"no row of {run.name} matches {dict(check.where)}"
    if check.value:
        return _figure(check, run, rows)
    seen = dict.fromkeys(outcome(row) for row in rows)
    wrong = [row for row in rows if outcome(row) not in check.outcome]
    told = [row for row in rows if check.reason and check.reason not in (row.reason or row.verdict_reason)]
    detail = f"{count(len(rows), 'cell')}: {', '.join(seen)}"
    if wrong or told:
        first = (wrong or told)[0]
        return False, f"{detail}; {outcome(first)}: {first.reason or first.verdict_reason}"
    return True, detail


def _figure(check: Check, run: Run, rows: Sequence[Row]) -> tuple[bool, str]:
    assert check.equals is not None
    if check.value == "cells":
        found: float | None = len(rows)
    elif check.value == "right":
        found = sum(row.status == "ok" and row.verdict in ("ok", "caveat") for row in rows)
    else:
        cells = {row.cell for row in rows}
        some = [point for point in points([run]) if point.rows[0].cell in cells]
        if len(some) != 1:
            return False, f"{count(len(some), 'cell')} match {dict(check.where)}; a figure is of one"
        found = getattr(some[0], check.value)
    if found is None:
        return False, f"{check.value} is not known"
    close = abs(found - check.equals) <= check.within * abs(check.equals)
    return close, f"{check.value} {_number(found)}, claimed {_number(check.equals)}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else significant(value, 5)


def _matches(row: Row, where: Mapping[str, Value | list[Value]]) -> bool:
    return all(row.axes.get(a) in (v if isinstance(v, list) else [v]) for a, v in where.items())


def _origin(run: Run, rows: Sequence[Row]) -> tuple[str, str, str]:
    """(date, device, versions) of the latest of these rows; skips have no date, so the run's stands in."""
    latest = max(rows or run.rows, key=lambda row: row.started_at, default=None)
    environment = latest.environment if latest else ""
    at = (latest.started_at if latest else "") or str(run.meta.get("started_at", ""))
    held = run.meta.get("environments", {}).get(environment, {})
    device = device_name(run.meta, environment) or str(held.get("device", {}).get("name", "CPU"))
    return at[:10], device, versions(held.get("stack", {}), {str(r.facts.get("triton", "")) for r in rows})


def versions(stack: Mapping[str, Any], triton: set[str] | None = None) -> str:
    """`torch 2.13.0, transformers 5.24.0`; Triton's versions as rows name them, where they do."""
    named = sorted(one for one in triton or () if one)
    words = [f"{name} {stack[name]}" for name in _SHOWN if name in stack and not (name == "triton" and named)]
    if named:
        words.append(f"triton {named[0]}" + (f" to {named[-1]}" if len(named) > 1 else ""))
    return ", ".join(words)
