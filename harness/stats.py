"""Statistics derived from raw samples. A leaf: standard library only."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence


def finite(samples: Iterable[float | None]) -> list[float]:
    """The samples that are numbers."""
    return [s for s in samples if s is not None and math.isfinite(s)]


def median(samples: Sequence[float]) -> float | None:
    """None for no samples."""
    return statistics.median(samples) if samples else None


def quantile(samples: Sequence[float], q: float) -> float | None:
    """Linear interpolation between order statistics; None for no samples."""
    if not samples:
        return None
    ordered = sorted(samples)
    at = q * (len(ordered) - 1)
    low = math.floor(at)
    high = math.ceil(at)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def relative_iqr(samples: Sequence[float]) -> float | None:
    """(q75 - q25) / median: the spread inside one process. None below four samples."""
    if len(samples) < 4:
        return None
    middle = statistics.median(samples)
    low, high = quantile(samples, 0.25), quantile(samples, 0.75)
    return (high - low) / middle if middle and low is not None and high is not None else None


def relative_range(medians: Sequence[float]) -> float | None:
    """(max - min) / median: the spread between processes. None below two."""
    if len(medians) < 2:
        return None
    middle = statistics.median(medians)
    return (max(medians) - min(medians)) / middle if middle else None


def drift(samples: Sequence[float]) -> float | None:
    """Median of the last third over the median of the first third, minus one. None below six samples."""
    third = len(samples) // 3
    if third < 2:
        return None
    first = statistics.median(samples[:third])
    return statistics.median(samples[-third:]) / first - 1 if first else None
