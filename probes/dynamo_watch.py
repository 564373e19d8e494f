"""What Dynamo says while it runs of frames that it does not compile. The one place that reads its log.

Dynamo writes each such frame to one logger, most of them at a level that nobody sees, and keeps the last 64
compilations alone: a recompile limit in a long run has left that list when somebody looks. So both are opened for as
long as a probe watches, and put back. The sentences are those of torch 2.10 to 2.13; `tests/test_silent_eager.py`
provokes each on the installed torch.
"""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
from collections.abc import Iterator
from typing import Literal

import msgspec
import torch

Kind = Literal[
    "recompile limit",
    "suppressed error",
    "bf16 skip",
    "skipped frame",
    "graph break",
    "cudagraphs",
    "backend",
]
_LOGGER = "torch._dynamo.convert_frame"
_LIMIT = re.compile(
    r"torch\._dynamo hit (config\.\w+ \(\d+\))\s+function: '.*' \((.+:\d+)\)\s+last reason: (.*)"
)
_REFUSED = re.compile(r"WON'T CONVERT (\S+) (.+) line (\d+)")
_SKIPPED = re.compile(r"skipping: (.+) \(reason: (.*), file: (.+)\)", re.S)
_TRACED_THEN_SKIPPED = "Dynamo decided to skip the frame while tracing: "
_NOTHING_TO_COMPILE = "No ops traced"
_KEPT_COMPILATIONS = 10_000


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """Why something that was to be compiled ran eagerly."""

    kind: Kind
    why: str
    where: str = ""  # file:line, or the file alone where Dynamo names no line

    def __str__(self) -> str:
        return f"{self.kind}{f' at {self.where}' if self.where else ''}: {self.why}"


class Watch(logging.Handler):
    """Causes heard so far, each once. `skipfiles`: frames that Dynamo never looks into, most of them torch's own."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.causes: list[Cause] = []
        self.skipfiles: list[Cause] = []
        self.warned: list[str] = []  # Python warnings that name bfloat16

    def emit(self, record: logging.LogRecord) -> None:
        """Sort one record of Dynamo's into the causes."""
        text = record.getMessage()
        if found := _LIMIT.search(text):
            self._add(
                "recompile limit", f"{found[1]} was hit; last guard that failed: {_guard(found[3])}", found[2]
            )
        elif found := _REFUSED.search(text):
            why = _reason(text)
            if "recompile limit exceeded" not in why:  # told above, with the guard
                kind: Kind = "suppressed error" if record.levelno >= logging.WARNING else "skipped frame"
                self._add(kind, f"{found[1]}: {why}", f"{found[2]}:{found[3]}")
        elif found := _SKIPPED.search(text):
            self._skipped(*found.groups())

    def _skipped(self, name: str, reason: str, file: str) -> None:
        if reason.startswith(_TRACED_THEN_SKIPPED):
            why = reason.removeprefix(_TRACED_THEN_SKIPPED)
            if not why.startswith(_NOTHING_TO_COMPILE):
                kind: Kind = "bf16 skip" if "BF16" in why else "skipped frame"
                self._add(kind, f"{name}: {why}", file)
        elif "skipfiles" in reason:
            self.skipfiles.append(
                Cause(kind="skipped frame", why=f"{name}: {reason}", where=short_path(file))
            )
            self.skipfiles.sort(key=lambda one: not one.why.startswith("forward:"))  # a module's own, first

    def _add(self, kind: Kind, why: str, where: str) -> None:
        cause = Cause(kind=kind, why=" ".join(why.split())[:400], where=short_path(where))
        if cause not in self.causes:
            self.causes.append(cause)


@contextlib.contextmanager
def watching() -> Iterator[Watch]:
    """Hear every frame that Dynamo gives up inside; its log and its record of compilations are put back after."""
    watch, logger = Watch(), logging.getLogger(_LOGGER)
    level, propagate = logger.level, logger.propagate
    logger.setLevel(logging.DEBUG)
    logger.propagate = False  # the cell's log would be mostly this
    logger.addHandler(watch)
    torch._dynamo.utils.set_compilation_metrics_limit(_KEPT_COMPILATIONS)
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            yield watch
    finally:
        logger.removeHandler(watch)
        logger.setLevel(level)
        logger.propagate = propagate
        watch.warned += [str(one.message) for one in warned if "bfloat16" in str(one.message)]


def breaks() -> list[Cause]:
    """Every graph break of this process, in order; one entry each time that its line was traced."""
    found = []
    for one in torch._dynamo.utils.graph_break_reasons:
        if getattr(one, "graph_break", True):
            stack = one.user_stack
            where = f"{short_path(stack[-1].filename)}:{stack[-1].lineno}" if stack else ""
            found.append(Cause(kind="graph break", why=_short(one.reason), where=where))
    return found


class Recompile(msgspec.Struct, frozen=True, kw_only=True):
    """One more version of a frame that had been compiled."""

    guard: str  # of an earlier version, which failed, with what it says
    where: str  # file:line that made the guard; that of the frame where Dynamo names no line
    frame: str


def recompiles() -> list[Recompile]:
    """Every recompile of this process, in order; those that a limit refused have no frame."""
    found = []
    for one in torch._dynamo.utils.get_compilation_metrics():
        if not one.recompile_reason:
            continue
        guard, _, code = _first_line(one.recompile_reason).partition("  #")
        place = re.search(r"# (\S+:\d+) in ", f"#{code}")
        own = f"{short_path(one.co_filename)}:{one.co_firstlineno}" if one.co_filename else ""
        words = " ".join(guard.split()).partition(": ")[2]
        found.append(Recompile(guard=words, where=place[1] if place else own, frame=one.co_name or ""))
    return found


def short_path(path: str) -> str:
    """A file of an installed package by its place there, any other as it is."""
    return path.rpartition("site-packages/")[2]


def _first_line(text: str) -> str:
    return str(text).splitlines()[0]


def _guard(text: str) -> str:
    """A guard that failed and its line of code, without Dynamo's advice and padding."""
    return " ".join(text.split("(HINT")[0].split())


def _short(reason: str) -> str:
    """The first line of a reason, and what follows "Explanation:", without hints and links."""
    lines = [line.strip() for line in str(reason).splitlines() if line.strip()]
    explained = next((line for line in lines if line.startswith("Explanation:")), "")
    return f"{lines[0]}. {explained.removeprefix('Explanation: ')}"[:400].strip() if lines else ""


def _reason(text: str) -> str:
    """The error at the end of a log entry with its traceback."""
    body = text.split("Traceback (most recent call last):")[-1]
    error = re.search(r"^(?:[\w.]+\.)?(\w+): (.*)$", body, re.M)
    if error is None:
        return _short(body)
    rest = body[error.end() :].strip()
    detail = next((line for line in rest.splitlines() if re.match(r"\w+Error: |\s*Explanation:", line)), "")
    return f"{error[1]}: {error[2]} {detail.strip()}".strip()
