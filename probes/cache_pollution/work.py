"""Cold, warm and after, each in its own process; then the verdict on what differs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from harness.cells import Task
from harness.rows import Fact, Memory, Parity, Result, Verdict
from probes.cache_pollution import PollutionAxes
from probes.cache_pollution.phase import Phase, PhaseLost, in_own_process
from probes.compile_matrix.cases import batches, case, loss_scale, widened
from probes.models.build import DTYPES
from probes.parity.steps import Recorded, Schedule, differences, record, reference, verdicts

_WORST_FIRST: tuple[Verdict, ...] = ("nonfinite", "mismatch", "no_reference", "caveat", "ok")


def run(axes: PollutionAxes, task: Task) -> Result:
    """Three phases, and what of warm and after is not cold's; a phase that dies is `crashed`."""
    folder = Path(task.folder)
    try:
        cold = in_own_process(axes, task, "cold", folder / "caches-cold", prior=False)
        warm = in_own_process(axes, task, "warm", folder / "caches-cold", prior=False)
        after = in_own_process(axes, task, "after", folder / "caches-after", prior=True)
    except PhaseLost as lost:
        return Result(status="crashed", reason=str(lost))
    left = {name: _values(phase) for name, phase in (("cold", cold), ("warm", warm), ("after", after))}
    changed = {name: differences(left["cold"], left[name]) for name in ("warm", "after")}
    held = {name: _parity(axes, task, left[name]) for name, differing in changed.items() if differing}
    titles = {"warm": "warm", "after": f"after {axes.before}{' and a reset' if axes.reset else ''}"}
    verdict, reason = judge(cold, {"warm": warm, "after": after}, changed, held, titles)
    return Result(
        verdict=verdict,
        verdict_reason=reason,
        parity=held.get("after") or held.get("warm"),
        first_step_s=cold.first_step_s,
        memory=_memory(cold, task.device),
        facts={
            **_facts("cold", cold, []),
            **_facts("warm", warm, changed["warm"]),
            **_facts("after", after, changed["after"]),
        },
    )


def judge(
    cold: Phase,
    others: dict[str, Phase],
    changed: dict[str, list[str]],
    held: dict[str, Parity],
    titles: dict[str, str],
) -> tuple[Verdict, str]:
    """`mismatch`: other graphs than cold, or values beyond their bars. `caveat`: other bits within them."""
    worst: Verdict = "ok"
    words = []
    for name, phase in others.items():
        if state := state_changes(cold, phase):
            worst = _worse(worst, "mismatch")
            words.append(f"{titles[name]}: {'; '.join(state)}")
        if changed[name]:
            within = held[name]
            worst = _worse(worst, "caveat" if within.verdict in ("ok", "caveat") else within.verdict)
            bits = f"{len(changed[name])} tensors differ from cold, {changed[name][0]} first"
            words.append(f"{titles[name]}: {bits}; against float64: {within.verdict}: {within.reason}")
    if not words:
        words = [f"warm and {titles['after']}: the same bits and graphs as cold"]
    times = ", ".join(f"{titles[name]} {phase.compile_s:.2f} s" for name, phase in others.items())
    return worst, f"{'; '.join(words)}; compiling took cold {cold.compile_s:.2f} s, {times}"


def state_changes(cold: Phase, other: Phase) -> list[str]:
    """What was compiled differently, in words; empty where nothing was."""
    words = []
    if not other.runs:
        words.append("no compiled graph ran: all of it ran eagerly")
    elif other.graphs != cold.graphs:
        words.append(f"{other.graphs} graphs compiled, cold {cold.graphs}: earlier ones served")
    if other.symbols != cold.symbols:
        words.append(f"{other.symbols} sizes of inputs are symbols, cold {cold.symbols}")
    if len(other.recompiles) != len(cold.recompiles):
        why = f": {other.recompiles[0]}" if other.recompiles else ""
        words.append(f"{len(other.recompiles)} recompiles, cold {len(cold.recompiles)}{why}")
    if new := [one for one in other.given_up if one not in cold.given_up]:
        words.append(f"ran eagerly: {new[0]}")
    return words


def _worse(one: Verdict, other: Verdict) -> Verdict:
    return min(one, other, key=_WORST_FIRST.index)


def _values(phase: Phase) -> Recorded:
    found: Recorded = torch.load(phase.values, weights_only=False)  # written by a fork of this process
    return found


def _parity(axes: PollutionAxes, task: Task, candidate: Recorded) -> Parity:
    """Where bits differ, which side is off? Held to eager and float64, both taken in this process, afterwards."""
    cell, schedule = axes.matrix_axes(), Schedule(steps=max(2, task.measure.steps))
    module = case(cell, task.device, task.seed)
    given = batches(cell, schedule.batches, task.device, task.seed)
    scale = loss_scale(cell)
    eager, again = (record(module, module, given, schedule, scale=scale) for _ in range(2))
    ruler = reference(widened(module), given, schedule, scale=scale) if task.measure.check else None
    name = "float64" if ruler else "no reference was taken: measure.check is false"
    return verdicts(candidate, eager, again, ruler, dtype=DTYPES[cell.dtype], reference_name=name).whole


def _memory(phase: Phase, device: str) -> Memory:
    if device == "cuda":
        return Memory(compile_allocated_peak_bytes=phase.peak_bytes)
    return Memory(host_peak_bytes=phase.peak_bytes)


def _facts(name: str, phase: Phase, changed: Sequence[str]) -> dict[str, Fact]:
    found: dict[str, Any] = {
        "compile_s": phase.compile_s,
        "first_step_s": phase.first_step_s,
        "step_s": phase.step_s,
        "held_bytes": phase.held_bytes,
        "peak_bytes": phase.peak_bytes,
        "cache_hits": phase.hits,
        "cache_misses": phase.misses,
        "graphs": phase.graphs,
        "graph_runs": phase.runs,
        "symbolic_sizes": phase.symbols,
        "recompiles": "; ".join(phase.recompiles),
        "ran_eagerly": "; ".join(phase.given_up),
        "tensors_that_differ": len(changed),
    }
    return {f"{name}: {key}": value for key, value in found.items()}
