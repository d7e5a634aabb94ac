"""Means with their intervals, and how the page writes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gomuon.lab import formatting as w
from gomuon.lab.results.statistics import Paired, paired, student_t_quantile

NOT_RUN = "not run yet"
DIVERGED = "diverged"
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its Student-t interval; NaN ends where there is one value."""

    values: tuple[float, ...]
    mean: float
    low: float
    high: float


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of at least one value."""
    count = len(values)
    if count == 0:
        raise ValueError("the mean of nothing is undefined")
    mean = math.fsum(values) / count
    half = math.nan
    if count > 1:
        variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
        t = student_t_quantile(0.5 + CONFIDENCE / 2, count - 1)
        half = t * math.sqrt(variance / count)
    return Estimate(tuple(values), mean, mean - half, mean + half)


def known(values: Sequence[float]) -> bool:
    """Whether there is something to average and none of it diverged."""
    return bool(values) and all(math.isfinite(value) for value in values)


def relative(value: float, reference: float) -> float:
    return value / reference - 1


def relative_pairs(control: Sequence[float], candidate: Sequence[float]) -> Paired:
    """Paired differences in units of the control's mean over the seeds."""
    found = math.fsum(control) / len(control)
    return paired([a / found for a in control], [b / found for b in candidate], CONFIDENCE)


def percent_interval(low: float, high: float) -> str:
    if not (math.isfinite(low) and math.isfinite(high)):
        return w.ABSENT
    return f"{w.signed(100 * low, 2)} to {w.signed(100 * high, 2)} %"


def plain_interval(low: float, high: float, decimals: int = 5) -> str:
    if not (math.isfinite(low) and math.isfinite(high)):
        return w.ABSENT
    return f"{low:.{decimals}f} to {high:.{decimals}f}".replace("-", "−")


def amount(share: float) -> str:
    """A share as unsigned per cent, such as 0.38 %."""
    return f"{abs(100 * share):.2f} %"


def lower_or_higher(share: float) -> str:
    return f"{amount(share)} {'lower' if share < 0 else 'higher'}"


def told_apart(found: Paired) -> bool:
    """Whether the interval leaves zero out."""
    return found.high < 0 or found.low > 0
