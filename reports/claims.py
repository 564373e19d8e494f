"""claims.toml: what README, BENCH.md and the catalogue claim, with what checks each. Reads and checks the file alone.

A claim quotes its page, and is checked by a command, by committed rows, or by both: then the command is run where
this machine can, and elsewhere the rows stand for it. `needs` says what a machine must have for the command.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import msgspec

from harness.errors import HarnessError, unknown

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SCHEMA = 1
FILE = "claims.toml"
CATALOGUE = "TORCH_COMPILE_VOLTA.md"
Value = str | int | float | bool
NEEDS = ("cuda", "v100", "g++", "triton")  # or a version of Triton: "triton 3.2.0"
# What of a measured cell a claim may put into words; derived in reports.points.
VALUES = ("tokens_per_s", "peak_bytes", "first_step_s", "cells", "right")


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Check(_Strict, frozen=True, kw_only=True):
    """What shows a claim, right or wrong."""

    id: str
    command: str = (
        ""  # as a reader types it: python -m …; exit 0 unless `outcome` says what its cells come to
    )
    needs: tuple[str, ...] = ()
    timeout_s: float = 600
    run: str = ""  # folder of a committed run
    where: dict[str, Value | list[Value]] = {}  # axis -> value, or any of a list: which of its cells
    outcome: tuple[str, ...] = ()  # statuses or verdicts, one of which each of these cells has
    reason: str = ""  # that each cell's reason holds
    value: str = ""  # one of VALUES; with `equals`
    equals: float | None = None
    within: float = 0.005  # of it, relative

    def __post_init__(self) -> None:
        for need in self.needs:
            if need not in NEEDS and not re.fullmatch(r"triton \d+\.\d+\.\d+", need):
                raise ValueError(f"{self.id}: needs {need!r}; allowed: {', '.join(NEEDS)}, 'triton 3.2.0'")
        if self.command and not self.command.startswith("python -m "):
            raise ValueError(f"{self.id}: command {self.command!r}: start it with 'python -m '")
        if self.run and not (self.outcome or self.value):
            raise ValueError(f"{self.id}: names a run, and neither `outcome` nor `value` says what it shows")
        if bool(self.value) != (self.equals is not None) or (self.value and not self.run):
            raise ValueError(f"{self.id}: `value`, `equals` and `run` go together")
        if self.value and self.value not in VALUES:
            raise ValueError(f"{self.id}: unknown value {self.value!r}; allowed: {', '.join(VALUES)}")


class Claim(Check, frozen=True, kw_only=True):
    """A sentence of a page."""

    page: str
    says: str  # verbatim, line ends apart


class Failure(Check, frozen=True, kw_only=True):
    """An entry of the catalogue."""

    title: str
    affects: str  # versions, cards, dtypes
    symptom: str
    cause: str
    mitigation: str
    sources: tuple[str, ...]


class Table(_Strict, frozen=True, kw_only=True):
    """A run that the catalogue shows as a table."""

    title: str
    run: str
    command: str  # that measures it anew
    says: str = ""  # what to see in it
    by: tuple[str, ...] = ()  # of triton-lowering: one line per value of these axes,
    across: tuple[str, ...] = ()  # one column per value of these; both empty: one line per cell


class Claims(_Strict, frozen=True, kw_only=True):
    """The file."""

    schema: int
    table: tuple[Table, ...] = ()
    failure: tuple[Failure, ...] = ()
    claim: tuple[Claim, ...] = ()

    def checks(self) -> tuple[tuple[str, str, Check], ...]:
        """(page, words, check) of everything that is claimed, page by page."""
        failures = [(CATALOGUE, f"{one.title}: {one.symptom}", one) for one in self.failure]
        return (*((one.page, one.says, one) for one in self.claim), *failures)


def read(path: Path) -> Claims:
    """The claims in `path`. Raises HarnessError that says what is wrong with the file."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise HarnessError(f"{path}: cannot be read: {error}") from error
    if raw.get("schema") != SCHEMA:
        raise HarnessError(f"{path}: schema is {raw.get('schema')!r}; this program reads schema {SCHEMA}")
    try:
        claims = msgspec.convert(raw, Claims)
    except msgspec.ValidationError as error:
        raise HarnessError(f"{path}: {error}") from error
    seen: set[str] = set()
    for _, _, check in claims.checks():
        if check.id in seen:
            raise HarnessError(f"{path}: id {check.id!r} is there twice")
        seen.add(check.id)
    return claims


def only(claims: Claims, wanted: list[str]) -> set[str]:
    """The ids asked for; all of them where none is. Raises HarnessError for one that is not there."""
    known = [check.id for _, _, check in claims.checks()]
    for one in wanted:
        if one not in known:
            raise unknown("claim", one, known, "--only")
    return set(wanted or known)
