"""What was seen of one model in one precision, and the facts of a row that it becomes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from harness.rows import Fact
from probes.precision.reach import Largest, Scores


@dataclass(kw_only=True)
class Found:
    """What was seen of one model in one precision. Texts are "" where there is nothing to tell."""

    dtype: str  # the narrow one of the precision, e.g. "float16"
    limit: float  # its largest finite value
    attention: str
    scale: float  # of the loss, at first
    bf16: str = ""
    weights: str = ""  # the first parameter that is not finite
    largest: Largest = field(default_factory=Largest)  # in float32, of everything
    narrow: Largest = field(default_factory=Largest)  # in float32, of what the precision keeps in `dtype`
    scores: Scores = field(default_factory=Scores)
    forward: str = ""  # the first module that overflows in eager, and what it made
    backward: str = ""  # the same of the gradients, at `scale`
    finite_scale: float | None = None  # the first, halving, that leaves all gradients finite
    zero_gradients: tuple[str, ...] = ()  # parameters whose whole gradient is zero
    compiled: bool = False
    fallback: str = ""  # what was asked to be compiled and ran eagerly
    compiled_bad: str = ""  # what of the compiled model is not finite
    updates: int = 0
    skipped: int | None = None  # of the updates, by GradScaler; None without one
    after: str = ""  # what is not finite after the updates


def headroom(value: float, limit: float) -> float:
    """Powers of two between a value and the limit; negative beyond it, infinite for zero."""
    if value == 0.0:
        return math.inf
    return -math.inf if math.isinf(value) else math.log2(limit / value)


def facts_of(found: Found) -> tuple[dict[str, Fact], dict[str, str]]:
    """The row's facts, and why some of them are null. Weights that are not finite left the rest unmeasured."""
    facts: dict[str, Fact] = {"bf16": found.bf16, "loss_scale": found.scale, "limit": found.limit}
    if not found.weights:
        facts |= _measured(found)
    why = {
        "skipped_steps": "no updates with GradScaler were asked for",
        "finite_loss_scale": "the forward overflows: not searched"
        if found.forward
        else "no scale from the first down to 1 leaves finite gradients",
    }
    return facts, {f"facts.{name}": why[name] for name, value in facts.items() if value is None}


def _measured(found: Found) -> dict[str, Fact]:
    return {
        "largest_activation": found.largest.value,
        "largest_activation_in": found.largest.where,
        f"largest_in_{found.dtype}": found.narrow.value,
        f"largest_in_{found.dtype}_in": found.narrow.where,
        "headroom_powers_of_two": headroom(found.narrow.value, found.limit),
        "qk_unscaled": found.scores.unscaled.value,
        "qk_scaled": found.scores.scaled.value,
        "qk_in": found.scores.unscaled.where,
        "first_overflow_forward": found.forward or "none",
        "first_overflow_backward": found.backward or "none",
        "finite_loss_scale": found.finite_scale,
        "gradients_all_zero": len(found.zero_gradients),
        "updates": found.updates,
        "skipped_steps": found.skipped,
    }
