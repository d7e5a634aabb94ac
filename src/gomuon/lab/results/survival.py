"""Time to a target when some runs never reach it.

A run that does not reach the target is known to need longer than it ran: it is censored at its
length. Dropping it, or counting its length as a time that it reached, makes an arm look faster the
more often it fails. Kaplan and Meier's curve and its area up to the common length use such runs for
what they say.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gomuon.lab.results.comparisons import Comparison, compare_all, sign_test
from gomuon.lab.results.statistics import student_t_quantile


@dataclass(frozen=True)
class Time:
    """When a run reached its target, or how long it ran without reaching it."""

    updates: float
    reached: bool

    def restricted(self, horizon: float) -> float:
        """Its updates up to a horizon."""
        return min(self.updates, horizon)


@dataclass(frozen=True)
class Curve:
    """Kaplan and Meier's estimate: the share of runs still short of the target after each time."""

    times: tuple[float, ...]
    short: tuple[float, ...]

    def at(self, time: float) -> float:
        """The share that has not reached the target by a time."""
        place = np.searchsorted(self.times, time, side="right")
        return 1.0 if place == 0 else self.short[place - 1]


@dataclass(frozen=True)
class Summary:
    """What the times of one arm say.

    Attributes:
        runs, reached: how many there are, and how many of them reached the target.
        median: None if fewer than half reached it.
        mean: the restricted mean, which counts no run for more than the horizon.
        low, high: its 95 % interval; NaN with a single run.
    """

    runs: int
    reached: int
    median: float | None
    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class TimesCompared:
    """Two arms on the same seeds.

    Attributes:
        comparison: of the restricted times, candidate minus control.
        first, last, ties: on how many seeds the candidate is first, last, or neither.
        sign_p: of the test that it is first as often as last. It is the log-rank test with the
            seeds as strata, made exact.
    """

    comparison: Comparison
    first: int
    last: int
    ties: int
    sign_p: float


def kaplan_meier(times: Sequence[Time]) -> Curve:
    """The product-limit estimate, by scipy."""
    from scipy import stats  # imported late: it takes a second

    if not times:
        raise ValueError("there is no curve of no runs")
    data = stats.CensoredData(
        uncensored=[time.updates for time in times if time.reached],
        right=[time.updates for time in times if not time.reached],
    )
    found = stats.ecdf(data).sf
    return Curve(tuple(map(float, found.quantiles)), tuple(map(float, found.probabilities)))


def summarise(times: Sequence[Time], horizon: float, confidence: float = 0.95) -> Summary:
    """Median and restricted mean of an arm.

    The variance of the mean is Greenwood's, with n/(n − 1) and Student's t because seeds are few.
    If every run was watched up to the horizon it is the usual t interval of the restricted times.
    """
    curve = kaplan_meier(times)
    count, reached = len(times), sum(time.reached for time in times)
    mean = _area(curve, 0.0, horizon)
    half = math.nan
    if count > 1:
        variance = _greenwood(curve, times, horizon) * count / (count - 1)
        half = student_t_quantile(0.5 + confidence / 2, count - 1) * math.sqrt(variance)
    # Rounding: three of six runs are a half, although the product may come out above.
    halves = (t for t, short in zip(curve.times, curve.short, strict=True) if short <= 0.5 + 1e-12)
    return Summary(
        count,
        reached,
        next(halves, None),
        mean,
        max(0.0, mean - half) if count > 1 else math.nan,
        min(horizon, mean + half) if count > 1 else math.nan,
    )


def compare_times(
    pairs: Sequence[tuple[Mapping[int, Time], Mapping[int, Time]]],
    horizon: float,
    *,
    confidence: float = 0.95,
    family: int | None = None,
) -> list[TimesCompared]:
    """Compare (control, candidate), both by seed, on the seeds that they share.

    Every run must have been watched up to the horizon, or have reached the target before: then each
    seed's difference of restricted times is known, whether or not the runs reached the target.
    """
    for times in (time for pair in pairs for arm in pair for time in arm.values()):
        if not times.reached and times.updates < horizon:
            raise ValueError(f"a run was watched for {times.updates} of {horizon} updates only")
    shared = [sorted(set(control) & set(candidate)) for control, candidate in pairs]
    if not all(shared):
        raise ValueError("two arms have no seed in common")
    values = [
        (
            [control[seed].restricted(horizon) for seed in seeds],
            [candidate[seed].restricted(horizon) for seed in seeds],
        )
        for (control, candidate), seeds in zip(pairs, shared, strict=True)
    ]
    found = []
    for comparison in compare_all(values, confidence=confidence, family=family):
        differences = comparison.paired.differences
        first, last = sum(d < 0 for d in differences), sum(d > 0 for d in differences)
        ties = len(differences) - first - last
        found.append(TimesCompared(comparison, first, last, ties, sign_test(first, last)))
    return found


def _area(curve: Curve, start: float, end: float) -> float:
    """The area under the curve between two times."""
    inside = [time for time in curve.times if start < time < end]
    edges = [start, *inside, end]
    return math.fsum(curve.at(left) * (right - left) for left, right in itertools.pairwise(edges))


def _greenwood(curve: Curve, times: Sequence[Time], horizon: float) -> float:
    """The variance of the area up to the horizon: Σ (area after t)² d / (n (n − d))."""
    parts = []
    for time in curve.times:
        at_risk = sum(one.updates >= time for one in times)
        events = sum(one.reached and one.updates == time for one in times)
        if events and at_risk > events and time < horizon:
            area = _area(curve, time, horizon)
            parts.append(area**2 * events / (at_risk * (at_risk - events)))
    return math.fsum(parts)
