"""The row, written down: `results/ROW.md` and `results/row.schema.json`, from the structs and their comments.

`python -m harness.row_page` rewrites both; tests/test_row_page.py fails when they are older than harness/rows.py.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import get_args

import msgspec

from harness import rows
from harness.rows import Record, Result, Row

FOLDER = Path(__file__).resolve().parent.parent / "results"
_FIELD = re.compile(r"^    (\w+): (.+?)(?:  # (.*))?$")
_DEFAULT = re.compile(r" = (?!=).*$")
# Where each nested record is met when a row is read from top to bottom.
NESTED: tuple[type[Record], ...] = (
    rows.Memory,
    rows.CompileReport,
    rows.GraphBreak,
    rows.AttentionReport,
    rows.Parity,
    rows.TensorError,
    rows.DeviceState,
    rows.Collective,
    rows.Isolation,
)
_HEAD = f"""\
# A row, schema {rows.SCHEMA}

One JSON file per cell and replicate, `rows/<cell>.r<replicate>.json` in the folder of a run. Samples are raw; every
statistic is derived on reading. Sizes are bytes and times seconds unless the name says otherwise. A number that was
NaN or infinite is null, and `nulls` names it with the reason. `row.schema.json` says the same to a program.

`Status` is one of {", ".join(f"`{word}`" for word in get_args(rows.Status))}; `Verdict` one of
{", ".join(f"`{word}`" for word in get_args(rows.Verdict))}. `Number` is a float or null, `Fact` a string, a truth value,
a number or null. This page is made by `python -m harness.row_page` from `harness/rows.py`.
"""


def page() -> str:
    """ROW.md."""
    tables = [
        _section("The row", (Row, Result)),
        *(_section(f"`{kind.__name__}`", (kind,)) for kind in NESTED),
    ]
    return "\n".join([_HEAD, *tables])


def schema() -> str:
    """row.schema.json."""
    return msgspec.json.format(msgspec.json.encode(rows.json_schema()), indent=2).decode() + "\n"


def _section(title: str, kinds: tuple[type[Record], ...]) -> str:
    about = (inspect.getdoc(kinds[0]) or "").split("\n\n")[0] if kinds[0].__doc__ else ""
    lines = [
        f"## {title}",
        "",
        *([about, ""] if about else []),
        "| field | type | meaning |",
        "|:--|:--|:--|",
    ]
    for kind in kinds:
        lines += [f"| `{name}` | `{typed}` | {meaning} |" for name, typed, meaning in fields(kind)]
    return "\n".join(lines) + "\n"


def fields(kind: type[Record]) -> list[tuple[str, str, str]]:
    """(name, type, meaning) of the fields that `kind` itself declares; the meaning is the comment beside it."""
    found = []
    for line in inspect.getsource(kind).splitlines():
        match = _FIELD.match(line)
        if match is not None:
            typed = _DEFAULT.sub("", match[2]).strip().replace("|", "\\|")
            found.append((match[1], typed, (match[3] or "").replace("|", "\\|")))
    return found


def main() -> int:
    """Rewrite both files, and say where they are."""
    FOLDER.mkdir(exist_ok=True)
    for name, text in (("ROW.md", page()), ("row.schema.json", schema())):
        (FOLDER / name).write_text(text)
        print(f"results/{name}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
