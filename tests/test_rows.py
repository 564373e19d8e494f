"""Rows: strict JSON, whatever a cell found; and only rows of this schema are read."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import rows
from harness.rows import Row, RowError, decode, encode


def make(**fields: Any) -> Row:
    return Row(**{"suite": "s", "probe": "p", "cell": "c", "device": "cpu", "axes": {"seq": 1}, **fields})


def strict(data: bytes) -> Any:
    def refuse(word: str) -> None:
        raise AssertionError(word)

    return json.loads(data, parse_constant=refuse)


numbers = st.floats(allow_nan=True, allow_infinity=True)


@given(losses=st.lists(numbers, max_size=5), fact=numbers, wall=numbers, phase=numbers)
def test_every_float_may_be_non_finite_and_the_row_still_reads_back(
    losses: list[float], fact: float, wall: float, phase: float
) -> None:
    report = rows.CompileReport(asked="model", phases_s={"total": phase})
    row = make(loss=tuple(losses), facts={"f": fact}, wall_s=wall, compile=report)
    strict(encode(row))
    back = decode(encode(row))
    assert back.loss == tuple(x if math.isfinite(x) else None for x in losses)
    for path, value in {"facts.f": fact, "wall_s": wall, "compile.phases_s.total": phase}.items():
        assert (path in back.nulls) == (not math.isfinite(value))


def test_nulls_name_the_field_and_the_reason() -> None:
    back = decode(encode(make(step_s=(1.0, math.inf, math.nan), nulls={"mine": "kept"})))
    assert back.step_s == (1.0, None, None)
    assert back.nulls == {"mine": "kept", "step_s[1]": "infinity", "step_s[2]": "NaN"}


@given(text=st.text())
def test_any_text_survives(text: str) -> None:
    row = make(status="error", reason="x" + text, log_tail=(text,))
    assert decode(encode(row)).log_tail == (text,)


def test_a_lone_surrogate_is_written_escaped() -> None:
    row = decode(encode(make(status="error", reason="bad \udc80 name")))
    assert row.reason == "bad \\udc80 name"


@pytest.mark.parametrize(("status", "reason"), [("ok", "why"), ("error", "")])
def test_a_reason_stands_if_and_only_if_the_status_is_not_ok(status: Any, reason: str) -> None:
    with pytest.raises(ValueError, match="with reason"):
        make(status=status, reason=reason)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not JSON"),
        (encode(make())[:-20], "not JSON"),
        (b"[]", "schema None"),
        (encode(make()).replace(b'"schema":1', b'"schema":2'), "schema 2; this program reads schema 1"),
        (encode(make()).replace(b'"suite"', b'"suit"'), "suit"),
        (encode(make()).replace(b'"status":"ok"', b'"status":"fine"'), "fine"),
        (encode(make()).replace(b'"reason":""', b'"reason":"why"'), "with reason"),
    ],
)
def test_bytes_that_are_no_row_are_refused_with_the_reason(data: bytes, message: str) -> None:
    with pytest.raises(RowError, match=message):
        decode(data)


def test_every_float_field_of_a_record_may_be_null() -> None:
    """Else a NaN in it would be written as null and could not be read back."""
    for name in dir(rows):
        record = getattr(rows, name)
        if isinstance(record, type) and issubclass(record, rows.Record):
            for field in msgspec.structs.fields(record):
                text = str(field.type)
                assert "float" not in text or "None" in text, f"{name}.{field.name}: {text}"
