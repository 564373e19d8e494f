"""Call a compiled model as the axes vary it, and list what Dynamo broke, compiled again, or gave up."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

import tc_volta
from harness.cells import Task
from harness.rows import Fact, Result, Verdict
from probes.dynamo_watch import Cause, Recompile, breaks, recompiles, watching
from probes.graph_breaks import GROWTH, BreakAxes
from probes.models.build import DTYPES, build
from probes.text import tokens
from probes.train_step.compiler_view import look
from probes.train_step.training import implementation

_COMPILERS = {
    "mlp": tc_volta.compile_mlp_only,
    "layers": tc_volta.compile_layers,
    "model": tc_volta.compile,
}
_DYNAMIC = {"auto": None, "never": False, "always": True}
_LISTED = 40  # lines in a row's facts; how many there are in all is a fact of its own


def run(axes: BreakAxes, task: Task) -> Result:
    """The list of lines and guards, and a verdict on it; `unsupported` where tc_volta refuses the model."""
    model = build(
        axes.model,
        device=task.device,
        dtype=DTYPES[axes.dtype],
        attention=implementation(axes.attention),
        seed=task.seed,
    )
    try:
        _COMPILERS[axes.compile](model, dynamic=_DYNAMIC[axes.dynamic], backend=axes.backend)
    except tc_volta.Unsupported as refusal:
        return Result(status="unsupported", reason=str(refusal))
    calls = max(2, task.measure.steps)
    with watching() as watch:
        for at in range(calls):
            _call(model, axes, at, task.device)
    report = look(model, [])
    broken, again = breaks(), recompiles()
    causes = [*watch.causes, *(_backend(text) for text in tc_volta.report(model).fallbacks)]
    verdict, reason = judge(calls, report.graphs, broken, again, causes)
    return Result(
        verdict=verdict,
        verdict_reason=reason,
        compile=report,
        facts={"calls": calls, "graphs": report.graphs} | _facts(broken, again, causes),
    )


def judge(
    calls: int, graphs: int, broken: Sequence[Cause], again: Sequence[Recompile], causes: Sequence[Cause]
) -> tuple[Verdict, str]:
    """`mismatch`: something runs eagerly now. `caveat`: it broke, or compiled again. `ok`: one graph served."""
    words = []
    if not graphs:
        words.append("nothing was compiled")
    if causes:
        words.append(f"{_count(len(causes), 'frame')} given up to eager: {causes[0]}")
    if broken:
        lines = collections.Counter(one.where for one in broken)
        most, _ = lines.most_common(1)[0]
        why = next(one.why for one in broken if one.where == most)
        words.append(
            f"{_count(len(broken), 'graph break')} on {_count(len(lines), 'line')}: {most or 'no line'}: {why}"
        )
    if again:
        words.append(
            f"{_count(len(again), 'recompile')} in {calls} calls: {again[0].guard} ({again[0].where})"
        )
    if causes or not graphs:
        return "mismatch", "; ".join(words)
    if words:
        return "caveat", "; ".join(words)
    return "ok", f"no graph break and no recompile in {calls} calls of {_count(graphs, 'graph')}"


def _call(model: PreTrainedModel, axes: BreakAxes, at: int, device: str) -> None:
    """Forward and backward of call number `at`, from 0."""
    seq = axes.seq + (GROWTH * at if axes.vary == "seq" else 0)
    batch = axes.batch + (at if axes.vary == "batch" else 0)
    ids_BS = tokens(batch, seq, device)
    model.train(axes.vary != "mode" or at % 2 == 0)
    model.zero_grad(set_to_none=True)
    given: dict[str, Any] = {"use_cache": axes.use_cache}
    if axes.vary == "int":  # without labels: the loss wants all logits
        logits = model(input_ids=ids_BS, logits_to_keep=at + 1, **given).logits
        logits.float().square().mean().backward()
    else:
        model(input_ids=ids_BS, labels=ids_BS, **given).loss.backward()


def _facts(broken: Sequence[Cause], again: Sequence[Recompile], causes: Sequence[Cause]) -> dict[str, Fact]:
    """One fact per line and per guard, most frequent first."""
    lines = collections.Counter((one.where, one.why) for one in broken)
    guards = collections.Counter((one.where, one.frame, one.guard) for one in again)
    facts: dict[str, Fact] = {
        "graph_breaks": len(broken),
        "lines_that_break": len({one.where for one in broken}),
        "recompiles": len(again),
        "frames_given_up": len(causes),
    }
    for at, ((where, why), count) in enumerate(lines.most_common(_LISTED), 1):
        facts[f"break {at}"] = f"{where} ({count}x): {why}"
    for at, ((where, frame, guard), count) in enumerate(guards.most_common(_LISTED), 1):
        facts[f"recompile {at}"] = f"{where} in {frame or 'no new version'} ({count}x): {guard}"
    for at, cause in enumerate(causes[:_LISTED], 1):
        facts[f"given up {at}"] = str(cause)
    return facts


def _backend(error: str) -> Cause:
    return Cause(kind="backend", why=" ".join(error.split())[:400])


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"
