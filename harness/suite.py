"""Suite file -> cells. Reads TOML, checks it against the probe it names, multiplies the axes.

A suite stands alone: no inheritance, no interpolation. Everything wrong in it is found here, before any
device is touched and without importing torch.
"""

from __future__ import annotations

import functools
import itertools
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from harness.cells import Axes, AxisValue, Cell, Device, Measure, Probe, ProbeTable
from harness.errors import HarnessError, unknown
from harness.suite_file import SuiteFile, When, first_lower, read

SUITES = Path(__file__).resolve().parent.parent / "suites"


class Suite(msgspec.Struct, frozen=True, kw_only=True):
    """A checked suite and its cells, in the order in which they run."""

    name: str
    text: str
    file: SuiteFile
    probe: Probe
    cells: tuple[Cell, ...]
    whole: tuple[Cell, ...] = ()  # before --only and --shard
    warnings: tuple[str, ...] = ()


def find(name: str, device: Device) -> Path:
    """`single` -> suites/single.<device>.toml; a path is taken as it is. Raises HarnessError."""
    if name.endswith(".toml"):
        path = Path(name)
        if path.is_file():
            return path
        raise HarnessError(f"{name}: no such file")
    for folder in (Path("suites"), SUITES):
        for candidate in (folder / f"{name}.{device}.toml", folder / f"{name}.toml"):
            if candidate.is_file():
                return candidate
    names = sorted({path.name.split(".")[0] for path in SUITES.glob("*.toml")})
    raise unknown("suite", name, names, f"no suites/{name}.{device}.toml")


def load(path: Path, table: ProbeTable, device: Device | None = None) -> Suite:
    """The suite in `path`, every cell checked. `device` overrides the file's. Raises HarnessError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise HarnessError(f"{path}: cannot be read: {error}") from error
    return parse(text, str(path), table, device)


def parse(text: str, place: str, table: ProbeTable, device: Device | None = None) -> Suite:
    """As `load`, from the text itself; `place` names it in messages."""
    file = read(text, place)
    if file.probe not in table:
        raise unknown("probe", file.probe, table, f"{place}: probe")
    if device:
        file = msgspec.structs.replace(file, device=device)
    return _expand(file, table[file.probe], text, place)


def only(suite: Suite, filters: list[str]) -> Suite:
    """The suite with the cells that match every `axis=value[,value…]`."""
    wanted: list[tuple[str, set[str]]] = []
    for item in filters:
        axis, _, values = item.partition("=")
        if not values:
            raise HarnessError(f"--only {item}: write it as axis=value or axis=value,value")
        known = list(suite.cells[0].axes) if suite.cells else []
        if axis not in known:
            raise unknown("axis", axis, known, f"--only {item}")
        present = {_word(cell.axes[axis]) for cell in suite.cells}
        for value in values.split(","):
            if value not in present:
                raise unknown("value", value, sorted(present), f"--only {item}")
        wanted.append((axis, set(values.split(","))))
    cells = tuple(c for c in suite.cells if all(_word(c.axes[a]) in v for a, v in wanted))
    if not cells:
        raise HarnessError(f"--only {' --only '.join(filters)}: no cell matches all of them")
    return msgspec.structs.replace(suite, cells=cells, whole=suite.whole or suite.cells)


def shard(suite: Suite, part: str) -> Suite:
    """Part i of n, as "i/n" counted from 1: every n-th cell, so that long cells spread."""
    match = re.fullmatch(r"(\d+)/(\d+)", part)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise HarnessError(f"--shard {part}: write it as i/n with 1 <= i <= n, e.g. 2/4")
    part_of_it = suite.cells[int(match[1]) - 1 :: int(match[2])]
    return msgspec.structs.replace(suite, cells=part_of_it, whole=suite.whole or suite.cells)


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _expand(file: SuiteFile, probe: Probe, text: str, place: str) -> Suite:
    _check_axes(file, probe, place)
    _check_measure(file, probe, place)
    rules = _Rules(file, probe, place)
    how = msgspec.json.encode([_what_decides(file.measure), file.seed, file.env], order="sorted")
    cells: list[Cell] = []
    seen: set[tuple[tuple[str, AxisValue], ...]] = set()
    for where, point in _points(file):
        axes = _typed(point, probe, f"{place}: {where}")
        plain = _plain(axes)
        key = tuple(plain.items())
        if key in seen:
            raise HarnessError(f"{place}: {where}: this cell exists already: {plain}")
        seen.add(key)
        status, verdict = rules.expected(plain)
        cells.append(
            Cell(
                probe=probe.name,
                axes=plain,
                device=file.device,
                skip=rules.skip(plain) or probe.skip(axes, file.device),
                expect_status=status,
                expect_verdict=verdict,
                devices=probe.devices(axes) if file.device == "cuda" else 1,  # ranks share a CPU
                how=how,
            )
        )
    if not cells:
        raise HarnessError(f"{place}: no cells: `axes`, `fixed` and `include` are all empty")
    return Suite(
        name=Path(place).name.removesuffix(".toml"),
        text=text,
        file=file,
        probe=probe,
        cells=tuple(_interleaved(cells, file.replicates)),
        warnings=tuple(f"{place}: {name} matches no cell" for name in rules.unused()),
    )


def _what_decides(measure: Measure) -> dict[str, Any]:
    """Of the measure, what a figure depends on: a longer deadline measures the same."""
    return {k: v for k, v in msgspec.structs.asdict(measure).items() if k not in ("timeout_s", "grace_s")}


def _interleaved(cells: list[Cell], replicates: int) -> Iterator[Cell]:
    """All cells once, then all again: replicates of one cell spread over the run."""
    yield from cells
    for replicate in range(1, replicates):
        for cell in cells:
            yield msgspec.structs.replace(cell, replicate=replicate)


def _points(file: SuiteFile) -> Iterator[tuple[str, dict[str, AxisValue]]]:
    if file.axes or (file.fixed and not file.include):
        for values in itertools.product(*file.axes.values()):
            yield "axes", {**file.fixed, **dict(zip(file.axes, values, strict=True))}
    for i, extra in enumerate(file.include):
        yield f"include[{i}]", {**file.fixed, **extra}


def _plain(axes: Axes) -> dict[str, AxisValue]:
    return {name: getattr(axes, name) for name in axes.__struct_fields__}


class _Rules:
    """Skips and expectations of a suite, checked once, then applied to many cells."""

    def __init__(self, file: SuiteFile, probe: Probe, place: str) -> None:
        self._skips = [
            (_alternatives(r.when, probe, f"{place}: skip[{i}].when"), r) for i, r in enumerate(file.skip)
        ]
        self._expects = [
            (_alternatives(r.when, probe, f"{place}: expect[{i}].when"), r) for i, r in enumerate(file.expect)
        ]
        self._used: set[str] = set()

    def skip(self, axes: dict[str, AxisValue]) -> str:
        for i, (when, rule) in enumerate(self._skips):
            if all(axes[axis] in values for axis, values in when):
                self._used.add(f"skip[{i}]")
                return rule.reason
        return ""

    def expected(self, axes: dict[str, AxisValue]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        for i, (when, rule) in enumerate(self._expects):
            if all(axes[axis] in values for axis, values in when):
                self._used.add(f"expect[{i}]")
                return rule.status, rule.verdict
        return ("ok",), ("ok", "caveat")

    def unused(self) -> list[str]:
        names = [f"skip[{i}]" for i in range(len(self._skips))] + [
            f"expect[{i}]" for i in range(len(self._expects))
        ]
        return [name for name in names if name not in self._used]


def _alternatives(when: When, probe: Probe, place: str) -> list[tuple[str, list[AxisValue]]]:
    if not when:
        raise HarnessError(f"{place}: is empty; name at least one axis")
    tests = []
    for axis, value in when.items():
        values = value if isinstance(value, list) else [value]
        tests.append((axis, [_axis_value(axis, v, probe, f"{place}.{axis}") for v in values]))
    return tests


def _check_axes(file: SuiteFile, probe: Probe, place: str) -> None:
    """Each value alone first, so that the message names its place."""
    for axis, value in file.fixed.items():
        _axis_value(axis, value, probe, f"{place}: fixed.{axis}")
    for axis, values in file.axes.items():
        if axis in file.fixed:
            raise HarnessError(f"{place}: {axis} stands in both `fixed` and `axes`")
        if not values:
            raise HarnessError(f"{place}: axes.{axis}: is empty")
        for i, value in enumerate(values):
            _axis_value(axis, value, probe, f"{place}: axes.{axis}[{i}]")
    for i, point in enumerate(file.include):
        for axis, value in point.items():
            _axis_value(axis, value, probe, f"{place}: include[{i}].{axis}")
    for axis, value in file.baseline.items():
        _axis_value(axis, value, probe, f"{place}: baseline.{axis}")


def _check_measure(file: SuiteFile, probe: Probe, place: str) -> None:
    for name in probe.ignores:
        if getattr(file.measure, name) != getattr(Measure(), name):
            raise HarnessError(
                f"{place}: measure.{name}: has no effect on probe {probe.name!r}; leave it out"
            )


@functools.cache
def _axis_kinds(axes: type[Axes]) -> dict[str, Any]:
    return {field.name: field.type for field in msgspec.structs.fields(axes)}


def _axis_value(axis: str, value: AxisValue, probe: Probe, place: str) -> AxisValue:
    kinds = _axis_kinds(probe.axes)
    if axis not in kinds:
        raise unknown(f"axis of probe {probe.name!r}", axis, kinds, place)
    kind = kinds[axis]
    try:
        return typing.cast(AxisValue, msgspec.convert(value, kind))
    except msgspec.ValidationError as error:
        allowed = typing.get_args(kind) if typing.get_origin(kind) is Literal else ()
        if allowed:
            raise unknown("value", value, allowed, place) from error
        raise HarnessError(f"{place}: {value!r}: {first_lower(str(error))}") from error


def _typed(point: dict[str, AxisValue], probe: Probe, place: str) -> Axes:
    try:
        return msgspec.convert(point, probe.axes)
    except msgspec.ValidationError as error:
        raise HarnessError(f"{place}: {first_lower(str(error))}\n  in {point}") from error
