"""The page about rows says what the structs say, and is not older than they are."""

from __future__ import annotations

import msgspec

from harness import row_page, rows


def test_the_written_page_and_schema_are_those_of_the_structs() -> None:
    for name, text in (("ROW.md", row_page.page()), ("row.schema.json", row_page.schema())):
        assert (row_page.FOLDER / name).read_text() == text, "run `python -m harness.row_page`"


def test_every_field_of_every_record_is_on_the_page() -> None:
    records = {one for one in vars(rows).values() if isinstance(one, type) and issubclass(one, rows.Record)}
    assert records - {rows.Record, rows.Row, rows.Result} == set(row_page.NESTED)
    for record in records:
        declared = {name for kind in _ours(record) for name, _, _ in row_page.fields(kind)}
        assert {field.name for field in msgspec.structs.fields(record)} <= declared


def _ours(record: type[rows.Record]) -> list[type[rows.Record]]:
    return [kind for kind in record.__mro__ if issubclass(kind, rows.Record)]


def test_a_field_has_its_type_without_the_default_and_its_comment() -> None:
    found = {name: (typed, meaning) for name, typed, meaning in row_page.fields(rows.Result)}
    assert found["loss"] == ("tuple[Number, ...]", "one per step, first step and warm-up included")
    assert found["status"][0] == "Status"
