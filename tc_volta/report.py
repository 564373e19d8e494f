"""What compiling a model came to: what was asked, what was decided, what runs compiled, and what does not."""

from __future__ import annotations

import collections
import time
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tc_volta.policy import Decision

Counters = dict[str, collections.Counter[str]]


@dataclass(kw_only=True)
class Report:
    """Filled as graphs are compiled. graph_breaks and given_up are Dynamo's own count, over the whole process."""

    asked: str
    decisions: tuple[Decision, ...]
    options: dict[str, Any]
    notes: tuple[str, ...] = ()  # where options, or the mode, and the decisions disagree
    graphs: int = 0
    fallbacks: list[str] = field(default_factory=list)  # graphs that run eagerly, with Inductor's error
    skipped: list[str] = field(default_factory=list)  # graphs that the backend had Dynamo skip
    _before: Counters = field(default_factory=lambda: _counters(), repr=False)
    _began_us: float = field(default_factory=lambda: time.time() * 1e6, repr=False)

    @property
    def graph_breaks(self) -> dict[str, int]:
        """Reason -> count, of everything Dynamo traced since the model was compiled."""
        return _since(self._before, "graph_break")

    @property
    def frames_given_up(self) -> int:
        """Frames that Dynamo itself did not compile since the model was compiled."""
        frames = _since(self._before, "frames")
        return frames.get("total", 0) - frames.get("ok", 0)

    @property
    def given_up(self) -> tuple[str, ...]:
        """Why Dynamo gave frames up; of its last 64 compilations."""
        return _failures(self._began_us)

    @property
    def eager(self) -> bool:
        """Whether some of what was to be compiled runs eagerly."""
        return bool(self.fallbacks or self.skipped or self.frames_given_up)

    def __str__(self) -> str:
        lines = [f"asked: {self.asked}", f"graphs compiled: {self.graphs}"]
        if not self.graphs and not self.eager:
            lines.append("nothing is compiled yet: a graph is compiled when its module is first called")
        lines += [f"runs eagerly: {why}" for why in self.fallbacks + self.skipped]
        lines += [f"graph break ({n}x): {_first_line(why)}" for why, n in self.graph_breaks.items()]
        if self.frames_given_up:
            why = "; ".join(_first_line(one) for one in self.given_up) or "no reason kept"
            lines.append(f"frames that Dynamo gave up, and runs eagerly: {self.frames_given_up}: {why}")
        lines += self.notes
        lines += [f"{d.name} = {d.value}: {d.reason}" for d in self.decisions]
        return "\n".join(lines)


_reports: weakref.WeakKeyDictionary[nn.Module, Report] = weakref.WeakKeyDictionary()


def report(model: nn.Module) -> Report:
    """What compiling this model came to. Raises KeyError if it was not compiled by this library."""
    if model not in _reports:
        raise KeyError(f"{type(model).__name__} was not compiled by tc_volta")
    return _reports[model]


def keep(model: nn.Module, record: Report) -> None:
    """Have `report(model)` answer with this record; the model's lifetime is the record's."""
    _reports[model] = record


def _counters() -> Counters:
    """A copy of Dynamo's counters, the one place that reads them here."""
    return {name: collections.Counter(values) for name, values in torch._dynamo.utils.counters.items()}


def _since(before: Counters, name: str) -> dict[str, int]:
    now = collections.Counter(torch._dynamo.utils.counters.get(name, {}))
    return dict(now - before.get(name, collections.Counter()))


def _failures(since_us: float) -> tuple[str, ...]:
    return tuple(
        str(one.fail_reason)
        for one in torch._dynamo.utils.get_compilation_metrics()
        if one.fail_reason and (one.start_time_us or 0) >= since_us
    )


def _first_line(text: str) -> str:
    return text.splitlines()[0] if text else text
