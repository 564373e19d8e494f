"""Eager and compiled at two lengths, then parity, then the verdict."""

from __future__ import annotations

from pathlib import Path

import msgspec

import tc_volta
from harness.cells import Task
from harness.rows import Fact, Memory, Parity, Result, Verdict
from probes.backward_memory import BackwardMemoryAxes
from probes.backward_memory.ledger import by_kind, extra, largest, mib
from probes.backward_memory.measure import Side, measure
from probes.backward_memory.record import SOURCE
from probes.backward_memory.saved import Graphs
from probes.text import tokens
from probes.train_step import CUDAGRAPH_MODES
from probes.train_step.check import check
from probes.train_step.memory import out_of_memory
from probes.train_step.training import Training

# Kernels of a compiled step may want a little workspace, and allocators round: more than this is a finding.
MARGIN = 0.02
_NAMED = 5
_COMPILERS = {
    "mlp": tc_volta.compile_mlp_only,
    "layers": tc_volta.compile_layers,
    "model": tc_volta.compile,
}


def run(axes: BackwardMemoryAxes, task: Task) -> Result:
    """The verdict; memory that runs out is `oom`, what tc_volta's policy refuses is `unsupported`."""
    try:
        return _measured(axes, task)
    except tc_volta.Unsupported as refused:
        return Result(status="unsupported", reason=str(refused))
    except (MemoryError, RuntimeError) as error:
        if not (short := out_of_memory(error)):
            raise
        return Result(status="oom", reason=short)


def judge(eager: Side, compiled: Side, parity: Parity) -> tuple[Verdict, str]:
    """Parity first: memory that was saved by computing something else is no saving."""
    ratio = compiled.total_bytes / eager.total_bytes
    words = f"compiled peaks at {mib(compiled.total_bytes)}, eager at {mib(eager.total_bytes)} (ratio {ratio:.3f})"
    if parity.verdict not in ("ok", "caveat"):
        return parity.verdict, f"{words}; {parity.reason}"
    if ratio <= 1 + MARGIN:
        return parity.verdict, f"{words}, margin {MARGIN:.0%}; {parity.reason}"
    more = [f"{kind} {mib(delta)}" for kind, delta in _deltas(eager, compiled).items() if delta > 0]
    named = largest(extra(compiled.blocks, eager.blocks), 3)
    return "caveat", f"{words}; more than eager: {', '.join(more)}; extra at the peak: {'; '.join(named)}"


def _measured(axes: BackwardMemoryAxes, task: Task) -> Result:
    plain = msgspec.structs.replace(axes.step_axes(), compile="none", mode="default")
    training = Training(plain, task.device, task.seed)
    lengths = (axes.seq // 2, axes.seq)
    eager = [_at(training, seq, task, None) for seq in lengths]
    graphs = _compile(training, axes)
    compiled = [_at(training, seq, task, graphs) for seq in lengths]
    parity = check(training) if task.measure.check else _unchecked()
    verdict, reason = judge(eager[1], compiled[1], parity)
    tokens_apart = axes.batch * (lengths[1] - lengths[0])
    facts: dict[str, Fact] = {
        "ratio": compiled[1].total_bytes / eager[1].total_bytes,
        "margin": MARGIN,
        "peak_source": SOURCE[task.device],
        "parameters_and_batch_bytes": eager[1].held_bytes,
    }
    for name, sides in (("eager", eager), ("compiled", compiled)):
        facts |= _facts(name, sides[1])
        growth = (sides[1].total_bytes - sides[0].total_bytes) / tokens_apart
        facts[f"{name}_bytes_per_token"] = growth
    return Result(
        verdict=verdict,
        verdict_reason=reason,
        parity=parity,
        tokens_per_step=axes.batch * axes.seq,
        memory=Memory(allocated_peak_bytes=compiled[1].total_bytes if task.device == "cuda" else None),
        facts=facts,
        notes=_notes(axes, task.device),
    )


def _at(training: Training, seq: int, task: Task, graphs: Graphs | None) -> Side:
    training.ids_BS = tokens(training.axes.batch, seq, task.device)
    return measure(training, Path(task.folder), graphs)


def _compile(training: Training, axes: BackwardMemoryAxes) -> Graphs | None:
    """In place; None for the control, which stays eager."""
    if axes.compile == "none":
        return None
    graphs = Graphs()
    options = {"post_grad_custom_post_pass": graphs.look}
    _COMPILERS[axes.compile](training.model, mode=axes.mode, options=options)
    training.cudagraphs = axes.mode in CUDAGRAPH_MODES
    return graphs


def _unchecked() -> Parity:
    return Parity(verdict="no_reference", reason="no reference was taken: measure.check is false")


def _deltas(eager: Side, compiled: Side) -> dict[str, int]:
    mine, other = by_kind(compiled.blocks), by_kind(eager.blocks)
    return {kind: mine.get(kind, 0) - other.get(kind, 0) for kind in sorted({*mine, *other})}


def _facts(name: str, side: Side) -> dict[str, Fact]:
    facts: dict[str, Fact] = {
        f"{name}_peak_bytes": side.total_bytes,
        f"{name}_explained_bytes": side.held_bytes + side.explained_bytes,
        f"{name}_saved_bytes": side.saved_bytes,
        f"{name}_saved_tensors": side.saved_tensors,
    }
    facts |= {f"{name}_at_peak_{kind}_bytes": size for kind, size in by_kind(side.blocks).items()}
    ranked = largest(side.blocks, _NAMED)
    return facts | {f"{name}_largest_{at}": words for at, words in enumerate(ranked, start=1)}


def _notes(axes: BackwardMemoryAxes, device: str) -> tuple[str, ...]:
    notes = []
    if device == "cpu":
        notes.append(
            "a CPU has no device allocator: the peak is that of torch's own allocations, libraries left out"
        )
    if axes.checkpointing:
        notes.append(
            "inputs of checkpointed layers are held by the checkpoint, so they are not among the saved bytes"
        )
    if axes.mode in CUDAGRAPH_MODES:
        notes.append(
            "a replayed CUDA graph allocates nothing: its memory is held between steps, not explained by name"
        )
    return tuple(notes)
