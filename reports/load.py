"""A run read back from its folder: run.json and the rows. Nothing is written, moved or locked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from harness.errors import HarnessError
from harness.rows import Row, RowError, decode

SCHEMA = 1


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One execution of one suite, as its folder holds it."""

    name: str  # the suite's name; where run.json has none, the folder's
    title: str
    meta: dict[str, Any]  # run.json
    rows: tuple[Row, ...]
    damaged: tuple[tuple[str, str], ...] = ()  # file name, what is wrong with it


def load_run(folder: Path | str) -> Run:
    """The run in `folder`. A torn or foreign row is named in `damaged`.

    Raises HarnessError where `folder` holds no run, or a run.json of another schema.
    """
    folder = Path(folder)
    meta = _meta(folder / "run.json")
    if "suite" not in meta and not (folder / "rows").is_dir():
        raise HarnessError(f"{folder}: run.json names no suite, and there are no rows/: this is no run")
    rows: list[Row] = []
    damaged: list[tuple[str, str]] = []
    for path in sorted((folder / "rows").glob("*.json")):
        try:
            rows.append(_row(path))
        except (RowError, OSError) as error:
            damaged.append((path.name, str(error)))
    name = str(meta.get("suite") or folder.resolve().name)
    title = str(meta.get("title") or name)
    return Run(name=name, title=title, meta=meta, rows=tuple(rows), damaged=tuple(damaged))


def _row(path: Path) -> Row:
    row = decode(path.read_bytes())
    if path.name != f"{row.cell}.r{row.replicate}.json":
        raise RowError(f"holds cell {row.cell}.r{row.replicate}")
    return row


def _meta(path: Path) -> dict[str, Any]:
    try:
        meta = msgspec.json.decode(path.read_bytes())
    except FileNotFoundError as error:
        raise HarnessError(f"{path}: is not there; give the folder of a run (it holds run.json)") from error
    except (OSError, msgspec.DecodeError) as error:
        raise HarnessError(f"{path}: cannot be read: {error}") from error
    schema = meta.get("schema") if isinstance(meta, dict) else None
    if not isinstance(meta, dict) or schema != SCHEMA:
        newer = isinstance(schema, int) and schema > SCHEMA
        hint = "It was written by a newer version." if newer else "Is it the run.json of a run?"
        raise HarnessError(f"{path}: schema is {schema!r}; this program reads schema {SCHEMA}. {hint}")
    return meta
