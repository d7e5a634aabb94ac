"""Means with their intervals, and relative differences of paired runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gomuon.lab.results.statistics import Paired, paired, student_t_quantile

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A mean with its Student-t interval; both ends are NaN where there is one value only."""

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
    return Estimate(mean, mean - half, mean + half)


def all_finite(values: Sequence[float]) -> bool:
    """Whether there are values and none of them is of a run that diverged."""
    return bool(values) and all(math.isfinite(value) for value in values)


def relative(value: float, reference: float) -> float:
    return value / reference - 1


def relative_pairs(control: Sequence[float], candidate: Sequence[float]) -> Paired:
    """Paired differences, in units of the control's mean over the seeds."""
    mean = math.fsum(control) / len(control)
    return paired([a / mean for a in control], [b / mean for b in candidate], CONFIDENCE)


def excludes_zero(found: Paired) -> bool:
    """Whether the interval lies on one side of zero: the seeds tell the two arms apart."""
    return found.high < 0 or found.low > 0
