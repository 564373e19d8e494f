"""Step what was compiled, watch and profile it, judge. A scenario's verdict is on the judge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from torch import nn

import tc_volta
from harness.cells import Task
from harness.rows import CompileReport, Fact, Result
from probes.dynamo_watch import Cause, breaks, watching
from probes.silent_eager import SilentAxes
from probes.silent_eager.judge import Evidence, Judged, judge
from probes.silent_eager.ran import mark, observe
from probes.silent_eager.scenarios import Scenario, provoked
from probes.train_step import CUDAGRAPH_MODES
from probes.train_step.compiler_view import cudagraph_skips, look, seen
from probes.train_step.training import Training


def run(axes: SilentAxes, task: Task) -> Result:
    """The verdict on a model, or on whether a provoked cause was noticed."""
    if axes.cause == "none":
        return _model(axes, task)
    with provoked(axes.cause, task.device) as scenario:
        evidence, report = gather(
            scenario.model, scenario.step, scenario.steps, task.device, cudagraphs=scenario.cudagraphs
        )
    return _noticed(scenario, evidence, report)


def gather(
    model: nn.Module, step: Callable[[], Any], steps: int, device: str, *, cudagraphs: bool
) -> tuple[Evidence, CompileReport]:
    """Take `steps` steps and one more under the profiler. model: marked (`ran.mark`), tc_volta's or stock.

    steps: three at least where CUDA graphs are asked for, which are recorded in the second and run in the third.
    """
    with watching() as watch, cudagraph_skips() as skips:
        for _ in range(steps):
            step()
        ran = observe(step, device)
    report = _report(model, skips)
    fallbacks = [Cause(kind="backend", why=_line(text)) for text in _fallbacks(model)]
    warned = [Cause(kind="bf16 skip", why=_line(text)) for text in dict.fromkeys(watch.warned)]
    evidence = Evidence(
        ran=ran,
        causes=(*watch.causes, *warned, *fallbacks),
        breaks=tuple(breaks()),
        skipfiles=tuple(watch.skipfiles),
        cudagraphs=cudagraphs,
        cudagraph_skips=report.cudagraph_skips,
    )
    return evidence, report


def _model(axes: SilentAxes, task: Task) -> Result:
    training = Training(axes.step_axes(), task.device, task.seed)
    mark(_compiled_modules(training.model))
    asked = axes.mode in CUDAGRAPH_MODES
    decided = tc_volta.report(training.model)
    refused = decided.notes if asked and not decided.options.get("triton.cudagraphs") else ()
    steps = max(3, task.measure.steps)
    evidence, report = gather(
        training.model, training.step, steps, task.device, cudagraphs=asked and not refused
    )
    judged = judge(msgspec.structs.replace(evidence, refused=tuple(refused)))
    return Result(
        verdict=judged.verdict,
        verdict_reason=judged.reason,
        compile=report,
        facts=_facts(evidence, judged),
    )


def _noticed(scenario: Scenario, evidence: Evidence, report: CompileReport) -> Result:
    judged = judge(evidence)
    named = [one for one in judged.causes if one.kind == scenario.kind and scenario.word in str(one)]
    told = bool(named) if scenario.kind else scenario.word in judged.reason
    noticed = judged.verdict == "mismatch" and told
    wanted = f"{scenario.kind or 'no compiled graph'} ({scenario.word})"
    said = f"{judged.verdict}: {judged.reason}"
    return Result(
        verdict="ok" if noticed else "mismatch",
        verdict_reason=f"noticed: {said}" if noticed else f"NOT noticed: {wanted}; the judge said {said}",
        compile=report,
        facts=_facts(evidence, judged) | {"provoked": wanted},
        notes=(scenario.note,) if scenario.note else (),
    )


def _facts(evidence: Evidence, judged: Judged) -> dict[str, Fact]:
    ran = evidence.ran
    return {
        "judged": judged.verdict,
        "calls": ran.asked,
        "compiled_graphs_run": ran.compiled,
        "eager_operators": sum(ran.eager.values()),
        "eager_operator_names": ", ".join(f"{name} {count}x" for name, count in ran.eager.items()),
        "graph_launches": ran.graph_launches,
        "causes": "; ".join(map(str, judged.causes)),
    }


def _compiled_modules(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if module._compiled_call_impl is not None]


def _report(model: nn.Module, skips: list[str]) -> CompileReport:
    try:
        return look(model, skips)
    except KeyError:  # compiled by torch alone
        return seen("torch.compile", skips)


def _fallbacks(model: nn.Module) -> list[str]:
    try:
        return tc_volta.report(model).fallbacks
    except KeyError:
        return []


def _line(text: str) -> str:
    return " ".join(text.split())[:400]
