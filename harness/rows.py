"""The row: one cell, run once. A leaf: standard library and msgspec.

Samples are raw; every statistic is derived on reading (`harness.stats`, `reports`). JSON is strict: a NaN
or an infinity is written as null and named with its reason in `nulls`, which is why every float here may
be None. Sizes are bytes, times are seconds, unless the name says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, TypeVar

import msgspec

SCHEMA = 1

Status = Literal["ok", "skipped", "oom", "timeout", "crashed", "error", "unsupported"]
Verdict = Literal["ok", "caveat", "mismatch", "nonfinite", "no_reference"]
Number = float | None
Fact = str | bool | int | float | None
R = TypeVar("R", bound="Record")


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of everything that is stored in a row."""


class Memory(Record, frozen=True, kw_only=True):
    """Peaks of the device allocator (CUDA) and of the process (CPU: resident set)."""

    allocated_peak_bytes: int | None = None  # steady steps
    reserved_peak_bytes: int | None = None
    compile_allocated_peak_bytes: int | None = None  # first step: trace, compile, run once
    compile_reserved_peak_bytes: int | None = None
    host_peak_bytes: int | None = None  # resident set of the process, libraries included


class GraphBreak(Record, frozen=True, kw_only=True):
    reason: str
    where: str = ""  # file:line in the model's code


class CompileReport(Record, frozen=True, kw_only=True):
    """What the compiler did, and what it did not do in silence."""

    asked: str
    phases_s: dict[str, Number] = {}
    graphs: int = 0
    graph_breaks: tuple[GraphBreak, ...] = ()
    recompiles: tuple[str, ...] = ()
    cudagraphs: bool = False
    cudagraph_skips: tuple[str, ...] = ()
    fallbacks: tuple[str, ...] = ()  # graphs or frames that ran eagerly after all, with the reason


class AttentionReport(Record, frozen=True, kw_only=True):
    """The kernel that ran, from the profiler and not from the request."""

    asked: str
    ran: str  # a kernel family of tc_volta, or "unknown"
    honoured: bool
    evidence: dict[str, int] = {}  # kernel or operator name -> calls in one step
    source: str = ""  # where the evidence comes from, e.g. "profiler: CUDA kernels"


class TensorError(Record, frozen=True, kw_only=True):
    """One tensor of the candidate against the reference; errors are RMS(diff) / RMS(reference)."""

    name: str
    error: Number
    eager_error: Number
    cosine: Number
    outliers: int = 0  # elements whose error is beyond what rounding explains (probes.parity)
    problem: str = ""  # shape, dtype or non-finite disagreement, in words


class Parity(Record, frozen=True, kw_only=True):
    verdict: Verdict
    reason: str
    reference: str = ""  # e.g. "float64, eager, math attention"
    norm: str = "RMS(candidate - reference) / RMS(reference), per tensor"
    tensors: int = 0
    loss_reference: Number = None
    loss_eager: Number = None
    loss_candidate: Number = None
    worst: tuple[TensorError, ...] = ()  # the five worst, largest error over bar first


class DeviceState(Record, frozen=True, kw_only=True):
    """NVML, before and after the timed steps."""

    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    temperature_c: int | None = None
    power_w: Number = None
    power_limit_w: Number = None
    throttle_reasons: tuple[str, ...] = ()
    foreign_processes: tuple[str, ...] = ()  # "pid name bytes" of others on the same GPU


class Collective(Record, frozen=True, kw_only=True):
    calls: int
    bytes_sent: int
    seconds: Number = None


class Result(Record, frozen=True, kw_only=True):
    """What a cell's process found. The harness adds who, where and how to make a `Row` of it."""

    status: Status = "ok"
    reason: str = ""  # present if and only if status is not "ok"
    verdict: Verdict | None = None
    verdict_reason: str = ""
    tokens_per_step: int | None = None
    first_step_s: Number = None  # trace + compile + one step
    step_s: tuple[Number, ...] = ()  # steady state, one device-timed value per step
    loss: tuple[Number, ...] = ()  # one per step, first step and warm-up included
    flops_per_step: Number = None  # of the model's mathematics, recomputation not counted
    peak_flops_per_s: Number = None  # of the device at this dtype; None where it is not known
    peak_source: str = ""
    memory: Memory = Memory()
    compile: CompileReport | None = None
    attention: AttentionReport | None = None
    parity: Parity | None = None
    device_before: DeviceState | None = None
    device_after: DeviceState | None = None
    collectives: dict[str, Collective] = {}
    facts: dict[str, Fact] = {}  # what only this probe knows, flat
    notes: tuple[str, ...] = ()  # what a reader of the figure must know
    nulls: dict[str, str] = {}  # field path -> why it is null

    def __post_init__(self) -> None:
        if (self.status == "ok") == bool(self.reason):
            raise ValueError(f"status {self.status!r} with reason {self.reason!r}")


class Isolation(Record, frozen=True, kw_only=True):
    """How the cell was kept apart, and what was seen of it from outside."""

    method: Literal["forkserver", "spawn", "none"] = "none"  # none: skipped, no process
    reason: str = ""  # why it is not the method asked for
    cache: str = "cold"
    pid: int | None = None
    exit: str = ""  # "exit 0", "SIGKILL", …
    cpu_s: Number = None  # user + system, the cell's process and its children
    killed_strays: int = 0  # processes of the cell that had left its group
    neighbours: tuple[str, ...] = ()  # ids of cells that ran at the same time
    devices: tuple[str, ...] = ()
    env: dict[str, str] = {}  # behaviour flags the suite named


class Row(Result, frozen=True, kw_only=True):
    """One cell, run once; exactly one row for every (cell, replicate), whatever happened."""

    schema: int = SCHEMA
    suite: str
    probe: str
    cell: str  # hash of what decides the measurement
    replicate: int = 0
    device: str
    axes: Mapping[str, Fact]
    measure: dict[str, Fact] = {}
    seed: int = 0
    expected: bool = True  # status and verdict are among those the suite expects
    environment: str = ""  # key into run.json's `environments`
    fingerprint: dict[str, str] = {}  # stack, device, host, code
    started_at: str = ""  # UTC, ISO 8601
    wall_s: Number = None  # from the request to the reaped process
    isolation: Isolation = Isolation()
    log_tail: tuple[str, ...] = ()  # last lines of the cell's output, where it did not end well


class RowError(ValueError):
    """Bytes that are not a row of this schema."""


def encode(record: Record) -> bytes:
    """Strict JSON. Non-finite numbers become null and are named in the record's `nulls`."""
    plain = msgspec.to_builtins(record)
    nulls: dict[str, str] = {}
    plain = _strict(plain, "", nulls)
    assert isinstance(plain, dict)
    if nulls:
        plain["nulls"] = {**plain.get("nulls", {}), **nulls}
    return msgspec.json.encode(plain)


def decode(data: bytes) -> Row:
    """The row in `data`. Raises RowError that says what is wrong, a newer schema included."""
    return _decode(data, Row)


def decode_result(data: bytes) -> Result:
    """What a cell's process wrote. Raises RowError."""
    return _decode(data, Result)


def json_schema() -> dict[str, object]:
    """JSON Schema of a row, generated from the struct."""
    return msgspec.json.schema(Row)


def _decode(data: bytes, kind: type[R]) -> R:
    try:
        head = msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise RowError(f"not JSON: {error}") from error
    schema = head.get("schema", SCHEMA) if isinstance(head, dict) else None
    if schema != SCHEMA:
        raise RowError(f"schema {schema!r}; this program reads schema {SCHEMA}")
    try:
        return msgspec.convert(head, kind)
    except (msgspec.ValidationError, ValueError) as error:
        raise RowError(str(error)) from error


def _strict(value: object, path: str, nulls: dict[str, str]) -> object:
    match value:
        case float() if not math.isfinite(value):
            nulls[path] = "NaN" if math.isnan(value) else f"{'-' if value < 0 else ''}infinity"
            return None
        case str():
            return value.encode("utf-8", "backslashreplace").decode()
        case dict():
            return {
                _strict(k, path, nulls): _strict(v, f"{path}.{k}".lstrip("."), nulls)
                for k, v in value.items()
            }
        case list() | tuple():
            return [_strict(v, f"{path}[{i}]", nulls) for i, v in enumerate(value)]
    return value
