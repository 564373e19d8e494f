"""Are these gradients right? Candidate and eager against a reference in higher precision, tensor by tensor.

Method. Shape and dtype first. Then the places of NaN, +inf and -inf, as sets. Then

    error = RMS(x - reference) / RMS(reference)          in float64, per tensor

so that small gradients count as much as large ones, and the candidate's error against eager's own:

    bar = 2 * max(eager's error on this tensor, eager's median error over all tensors, 0.4 * u)

with u the dtype's unit roundoff, 2**-24, 2**-11 or 2**-8 (Higham, Accuracy and Stability of Numerical
Algorithms, 2nd ed., section 2.1). Rounding exact values alone costs 0.4 u in this norm (measured; an error
uniform in +-u/2..u of a value spread over a binade). The factor 2 is that of benchmarks/dynamo's comparator for
float32. A vector of fewer than 1,024 elements, a bias or a norm's weight, is held to eight times: it is a sum over
all tokens whose terms cancel (a key bias moves every score of a query alike, which softmax ignores), so eager's
error on it is one draw of a wide distribution; benchmarks/dynamo takes 8 below 500 elements. Where eager itself is mostly rounding noise (error above 0.1: a
gradient that is zero but for rounding), the tensor is held to ten times eager's error, and the verdict is a
caveat. One wrong element drowns in an RMS, so elements are counted whose error exceeds eight times the larger
of eager's largest and u * max|reference|; one is enough for a mismatch.

The metric is never changed in silence: without a reference the verdict is `no_reference`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.rows import Parity, TensorError, Verdict

UNIT_ROUNDOFF = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
}
ROUNDING = 0.4
FACTOR, SMALL_FACTOR, SMALL = 2.0, 8.0, 1024
NOISE, NOISE_FACTOR = 0.1, 10.0
OUTLIER = 8.0
_CHUNK = 1 << 24  # elements in float64 at a time: a large model's gradients are never all widened at once
_WORST = 5


@dataclass(frozen=True, kw_only=True)
class Losses:
    """The loss of one step, three ways."""

    candidate: float
    eager: float | None = None
    reference: float | None = None


@dataclass(frozen=True, kw_only=True)
class _Measured:
    name: str
    error: float = math.inf
    eager_error: float = math.inf
    cosine: float | None = None
    largest: float = 0.0
    outliers: int = 0
    elements: int = SMALL
    problem: str = ""
    nonfinite: bool = False


def compare(
    candidate: Mapping[str, Tensor],
    eager: Mapping[str, Tensor] | None,
    reference: Mapping[str, Tensor] | None,
    *,
    dtype: torch.dtype,
    reference_name: str,
    losses: Losses,
) -> Parity:
    """The verdict on the candidate's tensors and loss, with the five worst tensors.

    candidate, eager: name -> tensor, in `dtype`. reference: the same names, in higher precision; None where
    there is none, and the verdict is `no_reference`. reference_name says what it is ("float64, eager").
    """
    if reference is None or eager is None or losses.reference is None or losses.eager is None:
        return _without_reference(candidate, eager, reference_name, losses)
    measured = [
        _measure(name, candidate, eager, reference, dtype) for name in _names(candidate, eager, reference)
    ]
    floor = _floor(measured, dtype)
    loss = _loss_measure(losses, dtype)
    verdict, reason = _judge(measured, loss, floor, dtype, next(iter(reference.values())).dtype)
    ranked = sorted(measured, key=lambda m: _rank(m, floor), reverse=True)
    return Parity(
        verdict=verdict,
        reason=reason,
        reference=reference_name,
        tensors=len(measured),
        loss_reference=losses.reference,
        loss_eager=losses.eager,
        loss_candidate=losses.candidate,
        worst=tuple(_record(m) for m in ranked[:_WORST]),
    )


def _names(*sides: Mapping[str, Tensor]) -> list[str]:
    return list(dict.fromkeys(name for side in sides for name in side))


def _measure(
    name: str,
    candidate: Mapping[str, Tensor],
    eager: Mapping[str, Tensor],
    reference: Mapping[str, Tensor],
    dtype: torch.dtype,
) -> _Measured:
    if problem := _structure_problem(name, candidate, eager, reference):
        return _Measured(name=name, problem=problem)
    sums = _Sums()
    for c, e, r in _chunks(candidate[name].detach(), eager[name].detach(), reference[name].detach()):
        sums.add(c, e, r)
    if sums.nonfinite:
        return _Measured(name=name, problem=sums.nonfinite, nonfinite=True)
    limit = OUTLIER * max(sums.eager_largest, UNIT_ROUNDOFF[dtype] * sums.reference_largest)
    outliers = 0
    if sums.largest > limit:
        for c, _, r in _chunks(candidate[name].detach(), eager[name].detach(), reference[name].detach()):
            outliers += int(((c - r).abs() > limit).sum())
    return _Measured(
        name=name,
        error=_ratio(sums.difference, sums.reference),
        eager_error=_ratio(sums.eager_difference, sums.reference),
        cosine=sums.product / math.sqrt(sums.candidate * sums.reference)
        if sums.candidate and sums.reference
        else None,
        largest=sums.largest,
        outliers=outliers,
        elements=reference[name].numel(),
    )


def _structure_problem(name: str, *sides: Mapping[str, Tensor]) -> str:
    for side, word in zip(sides, ("candidate", "eager", "reference"), strict=True):
        if name not in side:
            return f"the {word} has no such tensor"
    candidate, eager, reference = (side[name] for side in sides)
    if not candidate.shape == eager.shape == reference.shape:
        return f"shape {tuple(candidate.shape)}, not {tuple(reference.shape)}"
    if candidate.dtype != eager.dtype:
        return f"dtype {candidate.dtype}, not {eager.dtype}"
    return ""


def _chunks(*tensors: Tensor) -> Iterator[list[Tensor]]:
    flat = [t.reshape(-1) for t in tensors]
    for start in range(0, max(1, flat[0].numel()), _CHUNK):
        yield [t[start : start + _CHUNK].double() for t in flat]


class _Sums:
    """What errors are made of, added up over chunks; one transfer from the device for each chunk."""

    def __init__(self) -> None:
        self.difference = self.eager_difference = self.reference = self.candidate = self.product = 0.0
        self.largest = self.eager_largest = self.reference_largest = 0.0
        self.nonfinite = ""

    def add(self, candidate: Tensor, eager: Tensor, reference: Tensor) -> None:
        if not candidate.numel():
            return
        off, eager_off = candidate - reference, eager - reference
        parts = torch.stack(
            [
                off.dot(off),
                eager_off.dot(eager_off),
                reference.dot(reference),
                candidate.dot(candidate),
                candidate.dot(reference),
                off.abs().max(),
                eager_off.abs().max(),
                reference.abs().max(),
            ]
        ).tolist()
        if not all(map(math.isfinite, parts)):
            self.nonfinite = self.nonfinite or _nonfinite_words(candidate, eager, reference)
            return
        self.difference += parts[0]
        self.eager_difference += parts[1]
        self.reference += parts[2]
        self.candidate += parts[3]
        self.product += parts[4]
        self.largest = max(self.largest, parts[5])
        self.eager_largest = max(self.eager_largest, parts[6])
        self.reference_largest = max(self.reference_largest, parts[7])


def _nonfinite_words(candidate: Tensor, eager: Tensor, reference: Tensor) -> str:
    """Where the three disagree on NaN and infinities, or that they agree on not being numbers."""
    classes = {"NaN": torch.isnan, "+inf": torch.isposinf, "-inf": torch.isneginf}
    for word, test in classes.items():
        here, there = test(candidate), test(reference)
        if not torch.equal(here, there):
            return f"{int((here & ~there).sum())} {word} where the reference has none, {int((there & ~here).sum())} missing"
    count = int((~torch.isfinite(candidate)).sum())
    if count:
        return (
            f"{count} elements are not finite in candidate and reference alike: nothing can be said of them"
        )
    return f"eager has {int((~torch.isfinite(eager)).sum())} elements that are not finite"


def _ratio(squares: float, reference_squares: float) -> float:
    """RMS over RMS. A reference of zeros is met by zeros alone."""
    if reference_squares == 0.0:
        return 0.0 if squares == 0.0 else math.inf
    return math.sqrt(squares / reference_squares)


def _loss_measure(losses: Losses, dtype: torch.dtype) -> _Measured:
    assert losses.reference is not None
    assert losses.eager is not None
    values = (losses.candidate, losses.eager, losses.reference)
    if not all(map(math.isfinite, values)):
        return _Measured(
            name="loss",
            problem=f"candidate {values[0]}, eager {values[1]}, reference {values[2]}",
            nonfinite=True,
        )
    scale = abs(losses.reference) or 1.0
    return _Measured(
        name="loss",
        error=abs(losses.candidate - losses.reference) / scale,
        eager_error=abs(losses.eager - losses.reference) / scale,
    )


def _floor(measured: list[_Measured], dtype: torch.dtype) -> float:
    errors = [m.eager_error for m in measured if math.isfinite(m.eager_error)]
    return max(statistics.median(errors) if errors else 0.0, ROUNDING * UNIT_ROUNDOFF[dtype])


def _bar(m: _Measured, floor: float) -> float:
    if m.eager_error > NOISE:
        return NOISE_FACTOR * m.eager_error
    factor = SMALL_FACTOR if m.elements < SMALL else FACTOR
    return factor * max(m.eager_error, floor)


def _rank(m: _Measured, floor: float) -> float:
    """How far beyond its bar; what is wrong otherwise comes first."""
    if m.problem:
        return math.inf
    bar = _bar(m, floor)
    return max(m.error / bar if math.isfinite(bar) else 1.0, 1.0 + m.outliers if m.outliers else 0.0)


def _judge(
    measured: list[_Measured], loss: _Measured, floor: float, dtype: torch.dtype, reference_dtype: torch.dtype
) -> tuple[Verdict, str]:
    everything = [*measured, loss]
    if broken := [m for m in everything if m.problem]:
        first = next((m for m in broken if m.nonfinite), broken[0])
        more = f" (and {len(broken) - 1} more)" if len(broken) > 1 else ""
        return "nonfinite" if first.nonfinite else "mismatch", f"{first.name}: {first.problem}{more}"
    loss_floor = ROUNDING * UNIT_ROUNDOFF[dtype]
    over = [(m, _bar(m, floor if m is not loss else loss_floor)) for m in everything]
    over = [(m, bar) for m, bar in over if not m.error <= bar]
    if over:
        m, bar = max(over, key=lambda pair: pair[0].error / pair[1])
        return (
            "mismatch",
            f"{m.name}: error {m.error:.2e}, eager's own {m.eager_error:.2e}, bar {bar:.2e}; {_of(over, everything)}",
        )
    if wild := [m for m in measured if m.outliers]:
        m = max(wild, key=lambda m: m.outliers)
        return (
            "mismatch",
            f"{m.name}: {m.outliers} elements off by up to {m.largest:.2e}, beyond what rounding explains",
        )
    worst = max(everything, key=lambda m: m.error / _bar(m, floor) if _bar(m, floor) else 0.0)
    fine = f"{len(measured)} tensors and the loss within their bars; nearest {worst.name}: {worst.error:.2e}, eager {worst.eager_error:.2e}"
    if UNIT_ROUNDOFF[reference_dtype] >= UNIT_ROUNDOFF[dtype]:
        return "caveat", f"{fine}; the reference is no more precise than the candidate"
    if noise := [m for m in measured if m.eager_error > NOISE]:
        return (
            "caveat",
            f"{fine}; {noise[0].name} is rounding noise even in eager (error {noise[0].eager_error:.1e})",
        )
    return "ok", fine


def _of(over: list[tuple[_Measured, float]], everything: list[_Measured]) -> str:
    return f"{len(over)} of {len(everything)} over their bar"


def _without_reference(
    candidate: Mapping[str, Tensor], eager: Mapping[str, Tensor] | None, reason: str, losses: Losses
) -> Parity:
    apart = ""
    if eager:
        worst = max((_difference(candidate[name], eager[name]), name) for name in candidate if name in eager)
        apart = f"; largest difference from eager, which proves nothing: {worst[0]:.2e} on {worst[1]}"
    return Parity(
        verdict="no_reference",
        reason=f"{reason}{apart}",
        tensors=len(candidate),
        loss_eager=losses.eager,
        loss_candidate=losses.candidate,
    )


def _difference(candidate: Tensor, eager: Tensor) -> float:
    if candidate.shape != eager.shape:
        return math.inf
    sums = _Sums()
    for c, e in _chunks(candidate.detach(), eager.detach()):
        sums.add(c, e, e)
    return math.inf if sums.nonfinite else _ratio(sums.difference, sums.reference)


def _record(m: _Measured) -> TensorError:
    return TensorError(
        name=m.name,
        error=m.error if not m.problem else None,
        eager_error=m.eager_error if not m.problem else None,
        cosine=m.cosine,
        outliers=m.outliers,
        problem=m.problem,
    )
