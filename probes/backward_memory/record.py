"""Every allocation of a step. CUDA: the caching allocator's history. CPU: the profiler's record of torch's allocator.

Both see what runs inside compiled code and custom ops, and neither sees what libraries allocate for themselves. The
allocator's history is torch.cuda.memory's, whose names begin with an underscore though its documentation is public;
they are used here and nowhere else.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from probes.backward_memory.ledger import Event

_ENTRIES = 1_000_000  # of history: a step of 28 layers makes some ten thousand
SOURCE = {
    "cpu": "torch.profiler's record of torch's CPU allocator, peak above what was held before the step",
    "cuda": "torch.cuda.max_memory_allocated, and the caching allocator's history for what lived then",
}


def recorded(step: Callable[[], object], device: str, folder: Path) -> list[Event]:
    """What `step` allocated and released, in order. folder: for a trace, which is removed."""
    return _cuda(step) if device == "cuda" else _cpu(step, folder)


def _cuda(step: Callable[[], object]) -> list[Event]:
    torch.cuda.synchronize()
    torch.cuda.memory._record_memory_history(max_entries=_ENTRIES, stacks="python", clear_history=True)
    try:
        step()
        torch.cuda.synchronize()
        traces = torch.cuda.memory._snapshot()["device_traces"]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    return events_of_history(traces[torch.cuda.current_device()])


def events_of_history(trace: list[dict[str, Any]]) -> list[Event]:
    """Allocations and releases, by the line of Python that asked. A release counts when it is requested, as in
    `memory_allocated`; what segments the allocator itself takes from CUDA is not counted.
    """
    found = []
    for entry in trace:
        if entry["action"] == "alloc":
            where = _line(entry.get("frames", ()))
            found.append(Event(address=entry["addr"], bytes=entry["size"], where=where))
        elif entry["action"] == "free_requested":
            found.append(Event(address=entry["addr"], bytes=-entry["size"]))
    return found


def _line(frames: Any) -> str:
    """The innermost frame outside of torch's own files, or the innermost of all."""
    named = [f"{Path(f['filename']).name}:{f['line']} {f['name']}" for f in frames if f["filename"]]
    ours = [
        name
        for name, f in zip(named, (f for f in frames if f["filename"]), strict=True)
        if "/torch/" not in f["filename"]
    ]
    return next(iter(ours or named), "no Python frame: autograd's backward")


def _cpu(step: Callable[[], object], folder: Path) -> list[Event]:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    path = folder / "allocations.json"
    profiler.export_chrome_trace(str(path))
    trace = json.loads(path.read_text())["traceEvents"]
    path.unlink()
    return events_of_trace(trace)


def events_of_trace(trace: list[dict[str, Any]]) -> list[Event]:
    """Allocations of a Chrome trace, each with the innermost operator that ran around it."""
    operators = sorted(
        (one for one in trace if one.get("cat") in ("cpu_op", "user_annotation") and one.get("ph") == "X"),
        key=lambda one: one["ts"],
    )
    starts = [one["ts"] for one in operators]
    memory = sorted(
        (one for one in trace if one.get("name") == "[memory]"), key=lambda one: one["args"]["Ev Idx"]
    )
    found = []
    for one in memory:
        arguments = one["args"]
        if arguments["Device Type"] != 0:
            continue
        where = _around(operators, starts, one) if arguments["Bytes"] > 0 else ""
        found.append(Event(address=arguments["Addr"], bytes=arguments["Bytes"], where=where))
    return found


def _around(operators: list[dict[str, Any]], starts: list[float], one: dict[str, Any]) -> str:
    """The operator that began last of those that have not ended: operators nest. An allocation by itself is a call
    of `aten::empty`, which says nothing: the one around it is named.
    """
    for at in range(bisect.bisect_right(starts, one["ts"]) - 1, -1, -1):
        operator = operators[at]
        if operator["tid"] != one["tid"] or operator["ts"] + operator["dur"] < one["ts"]:
            continue
        if not operator["name"].startswith("aten::empty"):
            return str(operator["name"])
    return "outside of operators"
