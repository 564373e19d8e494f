"""How far a tensor may be off, and the verdict.

    bar = 2 * eager's own error on this tensor        (8 * for a vector of fewer than 2,048 elements)
          at least 0.8 u                              rounding alone
          at least 32 u_ref, or 8 u_ref               what the reference itself does not resolve
          for a bias at least 4 * eager's absolute error on the weight beside it
          at most 0.5, or twice eager's error         so that zeros (error 1) never pass for a gradient

u is the dtype's unit roundoff, 2**-24, 2**-11 or 2**-8 (Higham, Accuracy and Stability of Numerical Algorithms, 2nd
ed., section 2.1); u_ref is the reference's. Rounding exact values alone costs 0.4 u in this norm (measured: an error
uniform in a half-ulp, values spread over a binade), and twice that is granted. The factor 2 is that of
benchmarks/dynamo's comparator for float32, here for all dtypes: an honest second attention kernel was at most 1.53
times eager on 1,100 matrices (tiny models, three dtypes, six seeds). A small vector is a sum over all tokens, so
eager's error on it is one draw from a wide distribution (honest: up to 2.2); benchmarks/dynamo takes 8 below 500
elements.

A key's bias moves every score of a query alike, which softmax ignores, so what its gradient adds up cancels, and the
more so the longer the sequence; eager happens to cancel its errors too, a fused kernel does not (honest: 11 times
eager at 2,048 tokens, growing). But a bias is the weight of a constant input of 1, beside inputs that were normalised
to an RMS of 1: in absolute terms it may be as far off as an element of its own weight. Honest: at most 1.6 times
eager's error there up to 2,048 tokens in three dtypes, 2.1 times at 4,096 in float32; 4 times is granted.

Where eager's error is above 0.5 on most tensors, the reference is another computation, and there is no verdict.
Where its error reaches 1 on some, it is no better than zeros: a gradient that is zero but for rounding. The tensor is
then held to ten times eager's error, and the verdict is a caveat, as it is from an error of 0.1 on.

A gradient that is zero in exact arithmetic (queries and keys where all tokens are the same) is rounding noise in the
reference too: its RMS is below what the reference resolves of the largest tensor beside it. Relative errors mean
nothing then; such a tensor may be as large as u times that largest tensor, and the verdict is a caveat.

A factor on a whole tensor is easier to see than an error of the same size, since rounding points everywhere and a
factor along the tensor. So what of the error lies along a matrix, its gain |<x, r> / <r, r> - 1|, is held to 1.25
times eager's error, or 2 u. Honest: at most 0.83 times eager's error and 0.8 u (an attention kernel exchanged, 1,300
matrices, three dtypes, up to 1,024 tokens). In bfloat16 this catches 1.01 where the error alone does not.

Without eager the bar is fixed: 8 u for float16 and bfloat16, whose products are added up in float32, so that a few
roundings on the way in and out are all; 32 u for float32 and float64, which add up in themselves.

The loss is one number: at most twice eager's relative error, or a floor. In half precision models take it in
float32 (honest: up to 0.02 u), so 1.25 u is generous and still rejects half a per cent in bfloat16; in float32 it
is a sum of many terms in its own dtype (honest: up to 2.6 u), so 8 u.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.rows import Verdict

UNIT_ROUNDOFF = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
}
_HALF = (torch.float16, torch.bfloat16)
ROUNDING = 0.4
FACTOR, VECTOR_FACTOR, VECTOR, BIAS_FACTOR = 2.0, 8.0, 2048, 4.0
CAP = 0.5
GAIN, GAIN_UNITS = 1.25, 2.0
NOISY, NOISE, NOISE_FACTOR = 0.1, 1.0, 10.0


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One tensor, or the loss: errors are RMS(x - reference) / RMS(reference)."""

    name: str
    error: float = math.inf
    eager_error: float | None = None  # None: no eager, or one that is not finite
    cosine: float | None = None
    gain: float = 0.0  # |<x, reference> / <reference, reference> - 1|
    largest: float = 0.0  # |candidate - reference|
    outliers: int = 0
    elements: int = 1
    scale: float = 0.0  # RMS(reference)
    vector: bool = False  # of few elements
    problem: str = ""  # why there is no error to tell: a name, shape, dtype or non-finite values
    nonfinite: bool = False
    note: str = ""  # makes an ok a caveat
    is_loss: bool = False


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A verdict and its one-line reason."""

    verdict: Verdict
    reason: str


def resolution(reference: torch.dtype) -> float:
    """The least relative error that a reference of this dtype can tell from its own. Also the fixed bar."""
    return (8.0 if reference in _HALF else 32.0) * UNIT_ROUNDOFF.get(reference, 1.0)


@dataclass(frozen=True, kw_only=True)
class Bars:
    """The bars of one comparison."""

    fixed: float  # without eager
    floor: float
    loss_floor: float
    gain_floor: float
    noise: float  # RMS below which a tensor of the reference is its own rounding noise
    allowed: float  # RMS that the candidate may have there
    coarse: bool  # the reference rounds as coarsely as the candidate
    absolute: Mapping[str, float]  # name -> RMS(eager - reference)

    @staticmethod
    def of(dtype: torch.dtype, reference: Mapping[str, Tensor], tensors: list[Measured]) -> Bars:
        """Those for a candidate computed in `dtype`; the coarsest tensor of the reference counts."""
        u = UNIT_ROUNDOFF[dtype]
        dtypes = {t.dtype for t in reference.values()} or {torch.float64}
        resolved = max(map(resolution, dtypes))
        largest = max((m.scale for m in tensors), default=0.0)
        return Bars(
            fixed=max(resolution(dtype), resolved),
            floor=max(FACTOR * ROUNDING * u, resolved),
            loss_floor=max((1.25 if dtype in _HALF else 8.0) * u, resolved / 4),
            gain_floor=max(GAIN_UNITS * u, resolved),
            noise=resolved * largest,
            allowed=u * largest,
            coarse=max(UNIT_ROUNDOFF.get(d, 1.0) for d in dtypes) >= u,
            absolute={m.name: m.eager_error * m.scale for m in tensors if m.eager_error is not None},
        )

    def bar(self, m: Measured) -> float:
        """The largest error at which the tensor (or the loss) still passes."""
        if m.eager_error is None:
            return self.loss_floor if m.is_loss else self.fixed
        if m.is_loss:
            return max(self.loss_floor, FACTOR * m.eager_error)
        if self.void(m):
            return max(NOISE_FACTOR * m.eager_error, self.allowed / m.scale)
        if m.eager_error >= NOISE:
            return NOISE_FACTOR * m.eager_error
        factor = VECTOR_FACTOR if m.vector else FACTOR
        most = max(CAP, FACTOR * m.eager_error)
        return max(self.floor, min(max(factor * m.eager_error, self._beside(m)), most))

    def void(self, m: Measured) -> bool:
        """Whether the reference of this tensor is but the rounding noise of others."""
        return 0.0 < m.scale < self.noise and not m.is_loss

    def gain_bar(self, m: Measured) -> float:
        """The largest gain; infinite where a factor is no evidence: few elements, no eager, an eager that is noise."""
        if m.eager_error is None or m.vector or m.is_loss or m.eager_error > NOISY or self.void(m):
            return math.inf
        return max(self.gain_floor, GAIN * m.eager_error, self._beside(m))

    def _beside(self, m: Measured) -> float:
        """The error that a bias may have because its own weight may; 0 for anything else."""
        layer, _, part = m.name.rpartition(".")
        if part != "bias" or not m.scale:
            return 0.0
        return BIAS_FACTOR * self.absolute.get(f"{layer}.weight", 0.0) / m.scale

    def times_over(self, m: Measured) -> float:
        """Error over bar; what is wrong otherwise comes first."""
        if m.problem:
            return math.inf
        gain = m.gain / self.gain_bar(m)
        wild = m.outliers and not self.void(m)
        return max(m.error / self.bar(m), gain, 1.0 + m.outliers if wild else 0.0)


def judge(tensors: list[Measured], losses: list[Measured], bars: Bars) -> Judged:
    """The verdict on all tensors and losses, with a reason that names the worst."""
    everything = [*tensors, *losses]
    if not tensors:
        return Judged(verdict="mismatch", reason="no tensors to compare")
    if wrong := (
        broken(everything)
        or _another(tensors, bars)
        or _over(everything, bars)
        or _scaled(everything, bars)
        or _wild(everything, bars)
    ):
        return wrong
    worst = max(everything, key=bars.times_over)
    what = f"{len(tensors)} tensors{' and the loss' if losses else ''} within their bars"
    fine = f"{what}; nearest {_numbers(worst, bars)}"
    if doubt := _doubt(everything, bars):
        return Judged(verdict="caveat", reason=f"{fine}; {doubt}")
    return Judged(verdict="ok", reason=fine)


def broken(everything: list[Measured]) -> Judged | None:
    """The verdict on what no error can be told of, non-finite values first; None where there is no such thing."""
    found = [m for m in everything if m.problem]
    if not found:
        return None
    first = next((m for m in found if m.nonfinite), found[0])
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    verdict: Verdict = "nonfinite" if first.nonfinite else "mismatch"
    return Judged(verdict=verdict, reason=f"{first.name}: {first.problem}{more}")


def _another(tensors: list[Measured], bars: Bars) -> Judged | None:
    """No verdict where eager is as far from most of the reference as zeros would be: bars made of that pass anything."""
    judged = [m for m in tensors if m.eager_error is not None and not bars.void(m)]
    far = [m for m in judged if m.eager_error is not None and m.eager_error > CAP]
    if 2 * len(far) <= len(judged):
        return None
    words = f"eager and the reference agree on {len(judged) - len(far)} of {len(judged)} tensors alone"
    return Judged(
        verdict="no_reference",
        reason=f"{words}: not the same weights or batch? {far[0].name}: {_errors(far[0])}",
    )


def _over(everything: list[Measured], bars: Bars) -> Judged | None:
    over = [m for m in everything if not m.error <= bars.bar(m)]
    if not over:
        return None
    worst = max(over, key=lambda m: m.error / bars.bar(m))
    return Judged(
        verdict="mismatch",
        reason=f"{_numbers(worst, bars)}; {len(over)} of {len(everything)} over their bar",
    )


def _scaled(everything: list[Measured], bars: Bars) -> Judged | None:
    scaled = [m for m in everything if m.gain > bars.gain_bar(m)]
    if not scaled:
        return None
    m = max(scaled, key=lambda m: m.gain / bars.gain_bar(m))
    words = f"off by a factor: {m.gain:.2e} from 1, bar {bars.gain_bar(m):.2e}"
    return Judged(
        verdict="mismatch",
        reason=f"{m.name}: {words}; {_errors(m)}; {len(scaled)} of {len(everything)} so",
    )


def _wild(everything: list[Measured], bars: Bars) -> Judged | None:
    wild = [m for m in everything if m.outliers and not bars.void(m)]
    if not wild:
        return None
    m = max(wild, key=lambda m: m.outliers)
    count = f"{m.outliers} of {m.elements:,} elements off by up to {m.largest:.2e}"
    return Judged(
        verdict="mismatch", reason=f"{m.name}: {count}, beyond what rounding explains; {_errors(m)}"
    )


def _doubt(everything: list[Measured], bars: Bars) -> str:
    """Why what passed is still no plain ok, or ""."""
    if bars.coarse:
        return "the reference is no more precise than the candidate"
    if noted := [m for m in everything if m.note]:
        return f"{noted[0].name}: {noted[0].note}"
    if void := [m for m in everything if bars.void(m)]:
        return f"{void[0].name} is zero but for rounding, in the reference too"
    noisy = [m for m in everything if m.eager_error is not None and m.eager_error > NOISY]
    if noisy:
        m = max(noisy, key=lambda m: m.eager_error or 0.0)
        return f"{m.name} is rounding noise even in eager (error {m.eager_error:.1e})"
    return ""


def _numbers(m: Measured, bars: Bars) -> str:
    return f"{m.name}: {_errors(m)}, bar {bars.bar(m):.2e}"


def _errors(m: Measured) -> str:
    eager = "no eager" if m.eager_error is None else f"eager's own {m.eager_error:.2e}"
    return f"error {m.error:.2e}, {eager}"
