"""What is known of a probe's cells on one kind of device: a committed file, from which only a worse end is a failure.

suites/expected/<probe>.<device>.toml holds one line per cell, its axes and what it came to. A cell that ends better
is no failure, and is told with the command that refreshes the file; so the file cannot hide a later relapse for long.
A cell that is not in the file is held to the suite's own expectation. `harness.suite` applies it; no torch here.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from harness.cells import Cell, Device
from harness.errors import HarnessError, unknown
from harness.rows import Row
from harness.suite import SUITES, Suite

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDER = SUITES / "expected"
# From right to lost. A verdict stands for a cell that ended; a status for one that has none.
ORDER = (
    "ok",
    "caveat",
    "no_reference",
    "unsupported",
    "oom",
    "mismatch",
    "nonfinite",
    "error",
    "timeout",
    "crashed",
)
_NOT_JUDGED = "skipped"
Known = Mapping[str, str]


def path_of(probe: str, device: Device) -> Path:
    """Where the expectation is committed."""
    return FOLDER / f"{probe}.{device}.toml"


def read(path: Path) -> Known:
    """Cell -> what it comes to; empty where there is no file. Raises HarnessError for a file that is none."""
    if not path.is_file():
        return {}
    try:
        cells = tomllib.loads(path.read_text(encoding="utf-8")).get("cells")
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise HarnessError(f"{path}: cannot be read: {error}") from error
    if not isinstance(cells, dict):
        raise HarnessError(f"{path}: has no table `cells`")
    for name, word in cells.items():
        if word not in ORDER:
            raise unknown("outcome", str(word), ORDER, f"{path}: {name}")
    return cells


def applied(suite: Suite, known: Known) -> Suite:
    """The suite whose known cells may end as they did, or better."""
    cells = tuple(_expecting(cell, known) for cell in suite.cells)
    return msgspec.structs.replace(suite, cells=cells)


def _expecting(cell: Cell, known: Known) -> Cell:
    word = known.get(name_of(cell.axes))
    if word is None:
        return cell
    allowed = ORDER[: ORDER.index(word) + 1]
    return msgspec.structs.replace(cell, expect_status=("ok", *allowed), expect_verdict=allowed)


def better(rows: Sequence[Row], known: Known) -> list[str]:
    """One line for each cell that ended better than the file says."""
    found = []
    for row in rows:
        before, now = known.get(name_of(row.axes)), outcome_of(row)
        if before and now != _NOT_JUDGED and ORDER.index(now) < ORDER.index(before):
            found.append(f"{name_of(row.axes)}: {now}, expected {before}")
    return found


def outcome_of(row: Row) -> str:
    """The verdict of a cell that ended well, the status of any other."""
    return row.status if row.status != "ok" else row.verdict or "ok"


def name_of(axes: Mapping[str, object]) -> str:
    """All axes, in the probe's order: "model=lm mode=default …"."""
    return " ".join(f"{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in axes.items())


def write(path: Path, rows: Sequence[Row]) -> int:
    """Take the rows for what is known; cells that were not run keep their line. Returns how many were taken."""
    taken = {name_of(row.axes): outcome_of(row) for row in rows if row.status != _NOT_JUDGED}
    lines = [
        "# What is known of these cells; `python -m harness.probe NAME --accept RUN` writes it. Worse is a failure.",
        "[cells]",
        *(f'"{name}" = "{word}"' for name, word in sorted({**read(path), **taken}.items())),
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return len(taken)
