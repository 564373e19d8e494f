"""The suite file as written: its keys, and messages that say where it is wrong.

TOML, one level of tables, unknown keys rejected with the nearest known one.
"""

from __future__ import annotations

import re
import sys
import typing
from typing import Any, Literal

import msgspec

from harness.cells import AxisValue, Device, Measure
from harness.errors import HarnessError, unknown
from harness.rows import Status, Verdict

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SCHEMA = 1
When = dict[str, AxisValue | list[AxisValue]]


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class SkipRule(_Strict, frozen=True, kw_only=True):
    when: When
    reason: str


class ExpectRule(_Strict, frozen=True, kw_only=True):
    when: When
    status: tuple[Status, ...] = ("ok",)
    verdict: tuple[Verdict, ...] = ("ok", "caveat")


class SuiteFile(_Strict, frozen=True, kw_only=True):
    """The file as written."""

    schema: Literal[1]
    title: str
    probe: str
    device: Device
    seed: int = 0
    replicates: int = 1
    measure: Measure = Measure()
    baseline: dict[str, AxisValue] = {}
    env: dict[str, str] = {}
    fixed: dict[str, AxisValue] = {}
    axes: dict[str, list[AxisValue]] = {}
    skip: list[SkipRule] = []
    include: list[dict[str, AxisValue]] = []
    expect: list[ExpectRule] = []


def read(text: str, place: str) -> SuiteFile:
    """The file's content, its keys and types checked. `place` names it in messages. Raises HarnessError."""
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise HarnessError(f"{place}: not TOML: {error}") from error
    if raw.get("schema") != SCHEMA:
        raise HarnessError(f"{place}: schema is {raw.get('schema')!r}; this program reads schema {SCHEMA}")
    file = _convert(raw, SuiteFile, place)
    if file.replicates < 1:
        raise HarnessError(f"{place}: replicates is {file.replicates}; the least allowed is 1")
    _check_env(file.env, place)
    for i, rule in enumerate(file.skip):
        if not rule.reason.strip():
            raise HarnessError(f"{place}: skip[{i}].reason: is empty; say why")
    return file


# The harness sets these for each cell, and its row says how.
_OURS = {
    "CUDA_VISIBLE_DEVICES": "choose with --devices",
    "TORCHINDUCTOR_CACHE_DIR": "choose with measure.cache",
    "TRITON_CACHE_DIR": "choose with measure.cache",
    "TMPDIR": "each cell has its own",
}


def _check_env(env: dict[str, str], place: str) -> None:
    for name, value in env.items():
        if name in _OURS:
            raise HarnessError(f"{place}: env.{name}: is the harness's own: {_OURS[name]}")
        if not name or "=" in name or "\0" in name + value:
            raise HarnessError(f"{place}: env: {name!r} = {value!r} cannot be an environment variable")


def first_lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _convert(raw: dict[str, Any], kind: type[SuiteFile], place: str) -> SuiteFile:
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise _explained(str(error), raw, place) from error


_STRUCTS = {"": SuiteFile, "measure": Measure, "skip": SkipRule, "expect": ExpectRule}
_CLOSED = {
    "device": typing.get_args(Device),
    "expect.status": typing.get_args(Status),
    "expect.verdict": typing.get_args(Verdict),
    "measure.cache": ("cold", "warm", "shared"),
}


def _explained(message: str, raw: dict[str, Any], place: str) -> HarnessError:
    """msgspec's message, with the path in our words, the nearest valid word and what is allowed."""
    at = re.search(r" - at `\$\.?([^`]*)`$", message)
    path = at[1] if at else ""
    struct = _STRUCTS.get(re.sub(r"\[.*", "", path.split(".")[0]))
    found = re.search(r"unknown field `([^`]*)`", message)
    if found and struct:
        where = f"{place}: {path}" if path else place
        return unknown("key", found[1], struct.__struct_fields__, where)
    closed = _CLOSED.get(re.sub(r"\[[^]]*\]", "", path))
    if closed and "enum value" in message:
        value = re.search(r"enum value '?([^']*?)'?(?: - |$)", message)
        return unknown("value", value[1] if value else "?", closed, f"{place}: {path}")
    text = first_lower(message.split(" - at ")[0])
    return HarnessError(f"{place}: {path or 'top level'}: {text}")
