"""Are these gradients right? Candidate and eager against a reference in higher precision, tensor by tensor.

Method. Names, shape and dtype first. Then the places of NaN, +inf and -inf, as sets: a place where both are not
finite says nothing of the arithmetic, so it is no pass either. Then, in float64,

    error = RMS(x - reference) / RMS(reference)          per tensor

so that small gradients count as much as large ones. The candidate's error is held to a multiple of eager's own on
the same tensor (`probes.parity.bars` has the multiples and their sources). One wrong element drowns in an RMS, so
elements are judged too (`probes.parity.tensors`). The loss is judged apart, with a floor of its own.

    ok            within every bar
    caveat        within every bar, but a reader must know something: the reference rounds as coarsely as the
                  candidate, eager itself is mostly noise on some tensor, eager is not finite
    mismatch      names, shape, dtype, error or outliers
    nonfinite     NaN or infinity in the candidate, or in the reference
    no_reference  nothing to judge with. The difference from eager is told, and is no verdict

The metric is never changed in silence: every reason names the tensor, its error and its bar.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.rows import Parity
from probes.parity.bars import UNIT_ROUNDOFF, Bars, Judged, Measured, broken, judge
from probes.parity.tensors import difference, measure, record

_WORST = 5


@dataclass(frozen=True, kw_only=True)
class Losses:
    """The loss of one step, three ways."""

    candidate: float
    eager: float | None = None
    reference: float | None = None


Tensors = Mapping[str, Tensor]
ByName = Mapping[str, Losses]


def compare(
    candidate: Tensors,
    eager: Tensors | None,
    reference: Tensors | None,
    *,
    dtype: torch.dtype,
    reference_name: str,
    losses: Losses | ByName | None = None,
) -> Parity:
    """The verdict on the candidate's tensors and loss, with the five worst tensors.

    candidate, eager: name -> tensor of any shape, computed in `dtype`. Without eager, errors are held to fixed bars.
    reference: the same names, in higher precision; None where there is none: the verdict is then `no_reference`,
    or worse where the tensors alone show it. Sides may lie on different devices.
    reference_name: what the reference is ("float64, eager attention"), or why there is none.
    losses: one, or several by name, as of several steps; None where there is none, as for a single operator.
    Raises ValueError for a dtype that has no unit roundoff here.
    """
    if dtype not in UNIT_ROUNDOFF:
        known = ", ".join(str(d) for d in UNIT_ROUNDOFF)
        raise ValueError(f"parity of {dtype} is not defined; it is for {known}")
    known_losses = _by_name(losses)
    with torch.no_grad():
        if reference is None or any(one.reference is None for one in known_losses.values()):
            return _without_reference(candidate, eager, reference_name, known_losses)
        names = _names(candidate, eager, reference)
        measured = [measure(name, candidate, eager, reference, dtype) for name in names]
    bars = Bars.of(dtype, reference, measured)
    judged = judge(measured, [_loss(name, one) for name, one in known_losses.items()], bars)
    return _parity(judged, measured, bars, reference_name, known_losses)


def _names(*sides: Tensors | None) -> list[str]:
    return list(dict.fromkeys(name for side in sides if side is not None for name in side))


def _by_name(losses: Losses | ByName | None) -> ByName:
    if losses is None:
        return {}
    return {"loss": losses} if isinstance(losses, Losses) else losses


def _loss(name: str, losses: Losses) -> Measured:
    assert losses.reference is not None
    if not (math.isfinite(losses.candidate) and math.isfinite(losses.reference)):
        words = f"candidate {losses.candidate}, eager {losses.eager}, reference {losses.reference}"
        return Measured(name=name, problem=words, nonfinite=True, is_loss=True)
    scale = abs(losses.reference) or 1.0
    known = losses.eager is not None and math.isfinite(losses.eager)
    return Measured(
        name=name,
        is_loss=True,
        error=abs(losses.candidate - losses.reference) / scale,
        eager_error=abs((losses.eager or 0.0) - losses.reference) / scale if known else None,
        note="" if known or losses.eager is None else f"eager's is {losses.eager}",
    )


def _parity(
    judged: Judged, measured: list[Measured], bars: Bars, reference_name: str, losses: ByName
) -> Parity:
    first = next(iter(losses.values()), None)
    ranked = sorted(measured, key=bars.times_over, reverse=True)
    return Parity(
        verdict=judged.verdict,
        reason=judged.reason,
        reference=reference_name,
        tensors=len(measured),
        loss_reference=first.reference if first else None,
        loss_eager=first.eager if first else None,
        loss_candidate=first.candidate if first else None,
        worst=tuple(record(m) for m in ranked[:_WORST]),
    )


def _without_reference(candidate: Tensors, eager: Tensors | None, why: str, losses: ByName) -> Parity:
    """What shows without one: names, shapes, dtypes, non-finite values. No error is judged; never a pass."""
    measured = [difference(name, candidate, eager) for name in _names(candidate, eager)]
    for name, one in losses.items():
        if not math.isfinite(one.candidate):
            measured.append(Measured(name=name, problem=f"candidate {one.candidate}", nonfinite=True))
    first = next(iter(losses.values()), None)
    judged = broken(measured)
    reason = f"{judged.reason}; {why}" if judged else why
    if eager and not judged:
        worst = max(measured, key=lambda m: m.error)
        reason += f"; largest difference from eager, which proves nothing: {worst.error:.2e} on {worst.name}"
    return Parity(
        verdict=judged.verdict if judged else "no_reference",
        reason=reason,
        tensors=len(candidate),
        loss_eager=first.eager if first else None,
        loss_candidate=first.candidate if first else None,
    )
