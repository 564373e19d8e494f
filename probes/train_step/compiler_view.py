"""What the compiler says it did, as a `CompileReport`. The one place that reads torch's private records."""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import Iterator
from typing import Any

import msgspec
import torch
from torch import nn

import tc_volta
from harness.rows import CompileReport, GraphBreak

# Durations of CompilationMetrics, each inside the one before it; names of torch 2.10 to 2.14. A forward's record
# has all of them; a backward that is compiled at its first run has a record of its own, from Inductor on.
_NESTED = (
    ("tracing", "dynamo_cumulative_compile_time_us"),
    ("autograd and partitioning", "aot_autograd_cumulative_compile_time_us"),
    ("lowering", "inductor_cumulative_compile_time_us"),
    ("code generation and kernels", "inductor_code_gen_cumulative_compile_time_us"),
)


@contextlib.contextmanager
def cudagraph_skips() -> Iterator[list[str]]:
    """Collect Inductor's messages about cudagraphs that it left out, while the model compiles and first runs."""
    heard: list[str] = []

    class Listen(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = _one_line(record.getMessage())
            if "skipping cudagraphs" in text.lower() and text not in heard:
                heard.append(text)

    listener = Listen()
    loggers = [
        logging.getLogger(name) for name in list(logging.root.manager.loggerDict) if "torch._inductor" in name
    ]
    for logger in loggers:
        logger.addHandler(listener)
    try:
        yield heard
    finally:
        for logger in loggers:
            logger.removeHandler(listener)


def look(model: nn.Module, skips: list[str]) -> CompileReport:
    """The report on a model that tc_volta compiled and that has run. Raises KeyError for any other."""
    record = tc_volta.report(model)
    found = seen(record.asked, skips)
    return msgspec.structs.replace(
        found,
        graphs=record.graphs,
        cudagraphs=bool(record.options.get("triton.cudagraphs")) and not found.cudagraph_skips,
        fallbacks=tuple(record.fallbacks + record.skipped) + found.fallbacks,
    )


def seen(asked: str, skips: list[str]) -> CompileReport:
    """What Dynamo and Inductor did in this process, whoever asked them; `cudagraphs` stays false."""
    metrics = _metrics()
    given_up = [
        f"Dynamo gave up a frame: {m.fail_reason}" for m in metrics if getattr(m, "fail_reason", None)
    ]
    return CompileReport(
        asked=asked,
        phases_s=_phases(metrics),
        graphs=int(torch._dynamo.utils.counters["stats"].get("unique_graphs", 0)),
        graph_breaks=_breaks(),
        recompiles=tuple(
            str(m.recompile_reason)[:500] for m in metrics if getattr(m, "recompile_reason", None)
        ),
        cudagraph_skips=tuple(_skips(metrics, skips)),
        fallbacks=tuple(given_up),
    )


def _skips(metrics: list[Any], heard: list[str]) -> list[str]:
    """Why cudagraphs were left out: logged while they were recorded, kept in a metric, or at least counted."""
    kept = [_one_line(str(why)) for m in metrics if (why := getattr(m, "cudagraph_skip_reason", None))]
    counted = torch._dynamo.utils.counters["inductor"].get("cudagraph_skips", 0)
    reasons = list(dict.fromkeys([*heard, *kept]))
    return reasons or ([f"{counted} skips, no reason logged"] if counted else [])


def _one_line(message: str) -> str:
    """The reason, and the line of the model's code that follows it where Inductor knows one."""
    return " ".join(message.split())[:400]


def cache_use() -> dict[str, int]:
    """Hits and misses of Inductor's graph cache in this process; a cold cell has no hit."""
    counted = torch._dynamo.utils.counters["inductor"]
    return {name: int(counted.get(name, 0)) for name in ("fxgraph_cache_hit", "fxgraph_cache_miss")}


def _metrics() -> list[Any]:
    return list(torch._dynamo.utils.get_compilation_metrics())


def _phases(metrics: list[Any]) -> dict[str, float | None]:
    """Seconds by phase, none counted twice, and their total over forward and backward."""
    if not metrics:
        return {}
    found = {word: 0.0 for word, _ in _NESTED}
    for metric in metrics:
        spans = [(word, (getattr(metric, name, None) or 0) / 1e6) for word, name in _NESTED]
        for at, (word, seconds) in enumerate(spans):
            inner = next((span for _, span in spans[at + 1 :] if span), 0.0)
            found[word] += max(0.0, seconds - inner) if seconds else 0.0
    total = sum((getattr(metric, "duration_us", None) or 0) / 1e6 for metric in metrics)
    return {**found, "total": total}


def _breaks() -> tuple[GraphBreak, ...]:
    return tuple(
        GraphBreak(reason=str(found.reason).splitlines()[0][:300], where=_where(found.user_stack))
        for found in torch._dynamo.utils.graph_break_reasons
        if getattr(found, "graph_break", True)
    )


def _where(stack: list[traceback.FrameSummary]) -> str:
    return f"{stack[-1].filename}:{stack[-1].lineno}" if stack else ""
