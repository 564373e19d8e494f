"""One tensor of the candidate and of eager against the reference: the numbers, no verdict.

Tensors are widened to float64 in chunks on the candidate's device, so a [151936, 1536] gradient needs some tens of
megabytes more than itself; sums stay on the device until the whole tensor has been read. Two passes: the first
adds up squares, the second needs RMS(reference) to judge elements:

    off(i) = |x(i) - reference(i)| / (|reference(i)| + RMS(reference))

An element is an outlier if its `off` exceeds eight times the largest that eager has on any element, or eight times
the unit roundoff, whichever is more. The unit |r| + RMS is what makes one number serve a tensor whose rows differ
by orders of magnitude, as an embedding's gradient does. Over 1,100 gradients of tiny models in three dtypes, an
honest second kernel's largest was at most 2.0 times eager's. In a small vector one wrong element shows in the RMS, and
eager's largest is a draw from few (honest: up to 5.2), so its elements are not judged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.rows import TensorError
from probes.parity.bars import UNIT_ROUNDOFF, VECTOR, Measured, resolution

OUTLIER = 8.0
_CHUNK = 1 << 20  # elements in float64 at a time: 8 MiB, which a CPU's cache nearly holds
Tensors = Mapping[str, Tensor]
Triple = tuple[Tensor, Tensor | None, Tensor]
# Also where its squares are zero, from 1e-162 down: nothing that small is judged by luck.
_ZERO_REFERENCE = "the reference is zero everywhere, this is not: largest {:.2e}"


def measure(
    name: str, candidate: Tensors, eager: Tensors | None, reference: Tensors, dtype: torch.dtype
) -> Measured:
    """Errors, cosine and outliers of the tensor `name`; or its `problem`, where no error can be told."""
    if problem := _structure(name, candidate, eager, reference):
        return Measured(name=name, problem=problem)
    mine, ruler = candidate[name].detach(), reference[name].detach()
    theirs = None if eager is None else eager[name].detach()
    chunks = _Chunks(mine, theirs, ruler)
    sums = _Sums.of(chunks)
    if not (math.isfinite(sums.largest) and math.isfinite(sums.reference_largest)):
        return Measured(name=name, problem=_nonfinite(mine, ruler), nonfinite=True)
    if sums.reference == 0.0 and sums.largest:
        return Measured(name=name, problem=_ZERO_REFERENCE.format(sums.largest))
    note = ""
    if theirs is not None and not math.isfinite(sums.eager_largest):
        theirs, chunks, note = None, _Chunks(mine, None, ruler), "eager is not finite"
    rms = math.sqrt(sums.reference / max(1, mine.numel()))
    vector = mine.dim() <= 1 and mine.numel() < VECTOR
    return Measured(
        name=name,
        error=_ratio(sums.difference, sums.reference),
        eager_error=None if theirs is None else _ratio(sums.eager_difference, sums.reference),
        cosine=_cosine(sums),
        gain=abs(sums.product / sums.reference - 1.0) if sums.reference else 0.0,
        largest=sums.largest,
        outliers=0 if vector else _outliers(chunks, rms, dtype, ruler.dtype),
        elements=mine.numel(),
        scale=rms,
        vector=vector,
        note=note,
    )


def difference(name: str, candidate: Tensors, eager: Tensors | None) -> Measured:
    """Where there is no reference: what is wrong by itself, or the distance from eager, for information only."""
    if problem := _structure(name, candidate, eager, candidate):
        return Measured(name=name, problem=problem)
    mine = candidate[name].detach()
    theirs = mine if eager is None else eager[name].detach()
    sums = _Sums.of(_Chunks(mine, None, theirs))
    if not math.isfinite(sums.largest):
        if count := int((~torch.isfinite(mine)).sum()):
            return Measured(name=name, problem=f"{count} elements are not finite", nonfinite=True)
        return Measured(name=name)
    return Measured(name=name, error=_ratio(sums.difference, sums.reference))


def record(m: Measured) -> TensorError:
    """As it is stored in a row."""
    return TensorError(
        name=m.name,
        error=None if m.problem else m.error,
        eager_error=None if m.problem else m.eager_error,
        cosine=m.cosine,
        outliers=m.outliers,
        problem=m.problem,
    )


def _structure(name: str, candidate: Tensors, eager: Tensors | None, reference: Tensors) -> str:
    sides = {"the candidate": candidate, "the reference": reference}
    sides |= {} if eager is None else {"eager": eager}
    for word, side in sides.items():
        if name not in side:
            return f"{word} has no such tensor"
    mine = candidate[name]
    for word, side in sides.items():
        if side[name].shape != mine.shape:
            return f"shape {tuple(mine.shape)}, but {word}'s is {tuple(side[name].shape)}"
    if eager is not None and mine.dtype != eager[name].dtype:
        return f"dtype {mine.dtype}, but eager's is {eager[name].dtype}"
    return ""


class _Chunks:
    """All three sides flat, in float64, on the candidate's device, `_CHUNK` elements at a time; read twice."""

    def __init__(self, mine: Tensor, theirs: Tensor | None, ruler: Tensor) -> None:
        self._device = mine.device
        self._length = mine.numel()
        self._mine, self._ruler = mine.reshape(-1), ruler.reshape(-1)
        self._theirs = None if theirs is None else theirs.reshape(-1)
        self._kept = list(self._read()) if self._length <= _CHUNK else None

    def __iter__(self) -> Iterator[Triple]:
        return self._read() if self._kept is None else iter(self._kept)

    def _read(self) -> Iterator[Triple]:
        for start in range(0, self._length, _CHUNK):
            theirs = None if self._theirs is None else self._wide(self._theirs, start)
            yield self._wide(self._mine, start), theirs, self._wide(self._ruler, start)

    def _wide(self, flat: Tensor, start: int) -> Tensor:
        return flat[start : start + _CHUNK].to(device=self._device, dtype=torch.float64)


@dataclass(frozen=True, kw_only=True)
class _Sums:
    """What errors are made of, over all chunks; one transfer from the device for a tensor."""

    difference: float = 0.0  # sums of squares, but for `product`
    reference: float = 0.0
    candidate: float = 0.0
    product: float = 0.0
    eager_difference: float = 0.0
    largest: float = 0.0  # magnitudes
    reference_largest: float = 0.0
    eager_largest: float = 0.0

    @staticmethod
    def of(chunks: _Chunks) -> _Sums:
        sums: Tensor | None = None
        for x, y, r in chunks:
            off, eager_off = x - r, None if y is None else y - r
            eager_off = off if eager_off is None else eager_off
            squares = [off.dot(off), r.dot(r), x.dot(x), x.dot(r), eager_off.dot(eager_off)]
            maxima = [t.abs().amax() for t in (off, r, eager_off)]
            part = torch.stack(squares + maxima)
            if sums is not None:
                part = torch.cat([sums[:5] + part[:5], torch.maximum(sums[5:], part[5:])])
            sums = part
        return _Sums() if sums is None else _Sums(**dict(zip(_FIELDS, sums.tolist(), strict=True)))


_FIELDS = tuple(_Sums.__dataclass_fields__)


def _outliers(chunks: _Chunks, rms: float, dtype: torch.dtype, ruler: torch.dtype) -> int:
    """How many elements are further off than eager's elements allow."""
    off, eager_off = _largest_off(chunks, rms)
    limit = max(OUTLIER * max(eager_off, UNIT_ROUNDOFF[dtype]), resolution(ruler))
    if off <= limit:
        return 0
    return sum(int(((x - r).abs() > limit * (r.abs() + (rms or 1.0))).sum()) for x, _, r in chunks)


def _largest_off(chunks: _Chunks, rms: float) -> tuple[float, float]:
    """The largest `off` of any element, the candidate's and eager's (0 without eager)."""
    most: Tensor | None = None
    for x, y, r in chunks:
        unit = r.abs().add_(rms or 1.0)
        pair = [((side - r).abs_().div_(unit)).amax() for side in (x, r if y is None else y)]
        most = torch.stack(pair) if most is None else torch.maximum(most, torch.stack(pair))
    if most is None:
        return 0.0, 0.0
    mine, theirs = most.tolist()
    return mine, theirs


def _nonfinite(mine: Tensor, ruler: Tensor) -> str:
    """Where the two disagree on NaN and infinities, or that they agree on not being numbers."""
    ruler = ruler.to(mine.device)
    for word, test in {"NaN": torch.isnan, "+inf": torch.isposinf, "-inf": torch.isneginf}.items():
        here, there = test(mine), test(ruler)
        if not torch.equal(here, there):
            extra, missing = int((here & ~there).sum()), int((there & ~here).sum())
            return f"{extra} {word} where the reference has none, {missing} of the reference's missing"
    count = int((~torch.isfinite(mine)).sum())
    return f"{count} elements are not finite in candidate and reference alike: nothing can be said of them"


def _ratio(squares: float, reference_squares: float) -> float:
    """RMS over RMS."""
    if squares == 0.0:
        return 0.0
    return math.sqrt(squares / reference_squares) if reference_squares else math.inf


def _cosine(sums: _Sums) -> float | None:
    norms = math.sqrt(sums.candidate) * math.sqrt(sums.reference)
    return sums.product / norms if norms else None
