"""The same step eager and compiled: what is kept, how far memory rises, and that both are right."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from torch import Tensor

from harness.cells import Task
from harness.rows import CompileReport, Fact, Parity, Result, Verdict
from probes.backward_memory import BackwardMemoryAxes
from probes.backward_memory.saved import Saved, peak_above, saving
from probes.parity import Losses, compare
from probes.train_step import TrainStepAxes
from probes.train_step.compiler_view import cudagraph_skips, look
from probes.train_step.reference import Side, gradients, reference
from probes.train_step.training import Training

MARGIN = 1.05  # more than this, and the compiled step takes more memory
_MIB = 2**20


@dataclass
class OfSide:
    """What one side kept, took, and computed."""

    saved: Saved
    peak_bytes: int
    side: Side
    compile: CompileReport | None
    training: Training


def run(axes: BackwardMemoryAxes, task: Task) -> Result:
    """Eager first, then compiled, from the same weights."""
    eager, compiled = _measure(axes, task, "none"), _measure(axes, task, axes.compile)
    name, ruler = reference(eager.training)
    parity = compare(
        compiled.side[1],
        eager.side[1],
        ruler[1] if ruler else None,
        dtype=eager.training.dtype,
        reference_name=name,
        losses=Losses(candidate=compiled.side[0], eager=eager.side[0], reference=ruler[0] if ruler else None),
    )
    verdict, reason = judge(parity, compiled, eager)
    return Result(
        verdict=verdict,
        verdict_reason=reason,
        parity=parity,
        compile=compiled.compile,
        tokens_per_step=None,
        facts=_facts(axes, eager, compiled),
        notes=tuple(
            f"{what} keeps most in {line}"
            for what, one in (("eager", eager), ("compiled", compiled))
            for line in one.saved.lines()
        ),
    )


def judge(parity: Parity, compiled: OfSide, eager: OfSide) -> tuple[Verdict, str]:
    """Right first; then the peaks, and what the compiled side keeps more of."""
    words = (
        f"compiled rises by {compiled.peak_bytes / _MIB:.1f} MiB, eager by {eager.peak_bytes / _MIB:.1f}; kept for "
        f"backward {compiled.saved.bytes / _MIB:.1f} and {eager.saved.bytes / _MIB:.1f}"
    )
    if parity.verdict not in ("ok", "caveat"):
        return parity.verdict, parity.reason
    if compiled.peak_bytes <= MARGIN * eager.peak_bytes:
        return parity.verdict, words if parity.verdict == "ok" else f"{words}; {parity.reason}"
    return "caveat", f"compiled takes more: {words}; it keeps most in {compiled.saved.lines(1)[0]}"


def _measure(axes: BackwardMemoryAxes, task: Task, compile: str) -> OfSide:
    training = Training(_stock(axes, compile), task.device, task.seed)
    with cudagraph_skips() as skips:
        side = gradients(training, training.model)  # compiles, and warms up
    with saving(training.model, training.ids_BS) as saved:
        loss: Tensor = training.loss(training.model)
    del loss
    with peak_above(task.device) as rise:
        training.step()
    training.model.zero_grad(set_to_none=True)
    with contextlib.suppress(KeyError):  # the eager side was not compiled
        return OfSide(saved, rise[0], side, look(training.model, skips), training)
    return OfSide(saved, rise[0], side, None, training)


def _stock(axes: BackwardMemoryAxes, compile: str) -> TrainStepAxes:
    return TrainStepAxes(
        model=axes.model,
        compile=compile,  # type: ignore[arg-type]
        mode=axes.mode if compile != "none" else "default",
        attention=axes.attention,
        dtype=axes.dtype,
        seq=axes.seq,
        batch=axes.batch,
        checkpointing=axes.checkpointing,
    )


def _facts(axes: BackwardMemoryAxes, eager: OfSide, compiled: OfSide) -> dict[str, Fact]:
    tokens = axes.seq * axes.batch
    parameters = sum(p.numel() * p.element_size() for p in eager.training.model.parameters())
    return {
        "parameter_bytes": parameters,
        "logits_float32_bytes": 4 * tokens * eager.training.model.config.vocab_size,
        "eager_peak_bytes": eager.peak_bytes,
        "compiled_peak_bytes": compiled.peak_bytes,
        "compiled_over_eager": compiled.peak_bytes / eager.peak_bytes if eager.peak_bytes else None,
        "eager_saved_bytes": eager.saved.bytes,
        "compiled_saved_bytes": compiled.saved.bytes,
        "eager_saved_bytes_per_token": eager.saved.bytes / tokens,
        "compiled_saved_bytes_per_token": compiled.saved.bytes / tokens,
    }
