"""Which rows of an earlier run stand, so that their cells are not run again."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from harness import fingerprint
from harness.cells import Cell
from harness.rows import Row
from harness.runner import expected
from harness.store import Folder
from harness.suite import Suite

_AGAIN = ("crashed", "timeout", "error")  # with --retry


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """What a folder holds already."""

    rows: dict[str, Row]  # by cell id: of this call's cells, and valid
    elsewhere: int = 0  # rows of the suite's cells that --only or --shard left out of this call


def standing(
    folder: Folder, suite: Suite, digests: Mapping[str, str], *, retry: bool, no_device: bool
) -> Standing:
    """Rows of a cell of this suite, with the same stack, device and code.

    A row that does not stand is replaced when its cell is measured again, and set aside where the suite
    now skips it: what was measured is never lost to a skip. Rows of cells that the suite, before --only
    and --shard, does not have are set aside too: a folder holds one run of one suite.
    """
    wanted = {cell.id: cell for cell in suite.cells}
    others = {cell.id for cell in suite.whole} - set(wanted)
    rows: dict[str, Row] = {}
    elsewhere = 0
    for row in folder.read():
        id = f"{row.cell}.r{row.replicate}"
        cell = wanted.get(id)
        if cell is None:
            elsewhere += id in others
            if id not in others:
                folder.put_aside(row, "is of a cell that the suite no longer has")
        elif _stands(row, cell, digests, retry=retry, no_device=no_device):
            rows[id] = _judged_anew(folder, row, cell)
        elif cell.skip and row.status != "skipped":
            folder.put_aside(row, "was measured in another set-up, and the suite now skips its cell")
    return Standing(rows=rows, elsewhere=elsewhere)


def _stands(row: Row, cell: Cell, digests: Mapping[str, str], *, retry: bool, no_device: bool) -> bool:
    if row.status == "skipped":
        return row.reason == cell.skip  # a skip costs nothing: a new reason is written
    if no_device:
        return True  # without its device a cell can only be skipped: what was measured stays
    if retry and row.status in _AGAIN and not cell.skip:
        return False
    return all(row.fingerprint.get(part) == digests[part] for part in fingerprint.RESUME_PARTS)


def _judged_anew(folder: Folder, row: Row, cell: Cell) -> Row:
    """The suite's expectations may have changed since; they are no part of the measurement."""
    if row.expected != expected(cell, row):
        row = msgspec.structs.replace(row, expected=not row.expected)
        folder.write(row)
    return row
