"""What a probe declares, and what a cell is. A leaf: no torch, nothing else of ours but errors.

A probe is declared in a module that imports no torch, so that a suite is checked and planned without
it; `Probe.work` names the function that does the work inside the cell's process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import msgspec

Device = Literal["cpu", "cuda"]
AxisValue = str | int | float | bool


_MOST = 10**8  # of steps and of seconds: three years; infinity is no deadline


class Axes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of a probe's axes: one field per axis, typed by a `Literal` or a constrained scalar.

    Subclass it with `frozen=True, kw_only=True`. Fields without a default must be given by the suite. A rule between axes goes into the probe's
    `skip`, which answers with a reason, not into `__post_init__`.
    """


class Measure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How every cell of a suite is measured."""

    warmup_steps: int = 3  # after the first step, before the timed ones
    steps: int = 10
    timeout_s: float = 300.0  # a deadline on the whole cell, not on silence
    grace_s: float = 5.0  # between TERM and KILL
    cache: Literal["cold", "warm", "shared"] = "cold"  # compile caches: empty / kept per cell / one for all
    check: bool = True  # compare loss and gradients with a reference in higher precision

    def __post_init__(self) -> None:
        for name, value, least in (
            ("warmup_steps", self.warmup_steps, 0),
            ("steps", self.steps, 1),
            ("timeout_s", self.timeout_s, 0.1),
            ("grace_s", self.grace_s, 0.0),
        ):
            if not value >= least:
                raise ValueError(f"{name} is {value}; the least allowed is {least}")
            if value > _MOST:
                raise ValueError(f"{name} is {value}; the most allowed is {_MOST:,}")


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One cell on its way into its process; everything the child needs."""

    id: str  # "<cell hash>.r<replicate>", also the stem of the row's file name
    work: str  # "package.module:function"
    axes: dict[str, AxisValue]
    device: Device
    measure: Measure
    seed: int
    folder: str  # the cell's own empty scratch folder, removed afterwards
    result_path: str
    log_path: str
    env: dict[str, str] = {}  # late-read variables, set in the child (harness.environ)
    launcher: str = ""  # "torchrun …": it starts the ranks of a cell, not the cell's own process
    check_fresh: bool = True  # a fork proves that it is fresh before it starts


def _never(axes: Axes, device: Device) -> str:
    return ""


def _one(axes: Axes) -> int:
    return 1


def _unknown_cost(axes: Axes, device: Device, measure: Measure) -> float:
    return 1.0


class FromFile(msgspec.Struct, frozen=True, kw_only=True):
    """How a probe takes the values of one axis from a file of the user's, read without executing it."""

    axis: str
    names: Callable[
        [Path | None], list[str]
    ]  # of the file, or of the built-in set; ValueError says what is wrong
    open_axes: Callable[
        [str], dict[str, list[AxisValue]]
    ]  # of one name: the axes it leaves open, and their values
    left_out: Callable[[Path], str]  # what of the file makes no cell, and why; "" for nothing


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """One question that cells can answer. Declared without importing torch."""

    name: str
    question: str
    axes: type[Axes]
    work: str  # "package.module:function"; function(axes, task) -> harness.rows.Result
    timed: bool = True  # a timed cell has its device alone; others may run side by side on a CPU
    preload: tuple[str, ...] = ()  # modules the fork server imports; none may initialise CUDA
    # "package.module:function"(folder) run once in the fork server after preload: work that is the same
    # for every cell of a run, kept in a folder that cells only read. It runs no tensor operation.
    prepare: str = ""
    needs_prepare: Callable[[Axes, Device], bool] = lambda axes, device: False
    ignores: tuple[str, ...] = ()  # fields of Measure without effect here: a suite that sets one is refused
    hands_on_to: str = ""  # the probe that takes a failing cell, with the same axes
    sources: tuple[str, ...] = ()  # modules or packages whose files make up the `code` fingerprint
    from_file: FromFile | None = None  # what `--file PATH` asks
    skip: Callable[[Axes, Device], str] = _never  # a reason, or "" to run
    devices: Callable[[Axes], int] = _one  # how many devices a cell claims
    ranks: bool = False  # its cells are several ranks, which a launcher may start
    estimate_s: Callable[[Axes, Device, Measure], float] = _unknown_cost


ProbeTable = Mapping[str, Probe]


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One point of the matrix, once per replicate."""

    probe: str
    axes: dict[str, AxisValue]
    device: Device
    replicate: int = 0
    skip: str = ""  # the reason; a skipped cell still gets its row
    expect_status: tuple[str, ...] = ("ok",)
    expect_verdict: tuple[str, ...] = ("ok", "caveat")
    devices: int = 1
    how: bytes = b""  # measure, seed and environment of the suite, encoded

    @property
    def hash(self) -> str:
        """64 bits over what decides the measurement; equal for all replicates."""
        body = msgspec.json.encode([self.probe, self.device, self.axes], order="sorted")
        return hashlib.sha256(body + self.how).hexdigest()[:16]

    @property
    def id(self) -> str:
        """`<hash>.r<replicate>`: the stem of the row's file name."""
        return f"{self.hash}.r{self.replicate}"
