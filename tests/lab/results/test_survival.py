"""Times to a target with runs that never reach it: textbooks, scipy and the usual t test agree."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from scipy import stats

from gomuon.lab.results.survival import Time, compare_times, kaplan_meier, summarise


def times(reached: list[float], censored: list[float] | None = None) -> list[Time]:
    return [*(Time(t, True) for t in reached), *(Time(t, False) for t in censored or [])]


# Weeks of remission of leukemia patients (Freireich et al. 1963), as in every textbook.
TREATED = times([6, 6, 6, 7, 10, 13, 16, 22, 23], [6, 9, 10, 11, 17, 19, 20, 25, 32, 32, 34, 35])
PLACEBO = times([1, 1, 2, 2, 3, 4, 4, 5, 5, 8, 8, 8, 8, 11, 11, 12, 12, 15, 17, 22, 23])


def test_the_textbooks_curve() -> None:
    curve = kaplan_meier(TREATED)
    printed = {6: 0.8571, 7: 0.8067, 10: 0.7529, 13: 0.6902, 16: 0.6275, 22: 0.5378, 23: 0.4482}
    assert curve.at(5.9) == 1.0
    for week, share in printed.items():
        assert curve.at(week) == pytest.approx(share, abs=5e-5)
    assert curve.at(35) == pytest.approx(0.4482, abs=5e-5)


def test_the_textbooks_medians_and_means() -> None:
    treated, placebo = summarise(TREATED, 35), summarise(PLACEBO, 35)
    assert (treated.runs, treated.reached) == (21, 9)
    assert (treated.median, placebo.median) == (23, 8)
    assert treated.mean == pytest.approx(23.287, abs=5e-4)
    assert placebo.mean == pytest.approx(8.667, abs=5e-4)
    # Greenwood's standard errors as printed, 2.827 and 1.377, with n/(n − 1) and Student's t.
    t = stats.t.ppf(0.975, 20)
    for found, error in ((treated, 2.827), (placebo, 1.377)):
        assert found.mean - found.low == pytest.approx(t * error * math.sqrt(21 / 20), abs=2e-3)


@given(some.integers(0, 2**32), some.integers(2, 9), some.integers(20, 120))
@settings(max_examples=40, deadline=None)
def test_with_one_horizon_the_mean_is_the_t_interval_of_restricted_times(
    seed: int, count: int, horizon: int
) -> None:
    needed = np.random.default_rng(seed).integers(1, 100, count)
    found = summarise([Time(min(t, horizon), bool(t <= horizon)) for t in needed], horizon)
    restricted = np.minimum(needed, horizon)
    assert found.mean == pytest.approx(restricted.mean())
    if restricted.std() > 0:
        low, high = stats.t.interval(
            0.95, count - 1, restricted.mean(), restricted.std(ddof=1) / math.sqrt(count)
        )
        assert found.low == pytest.approx(max(0, low))
        assert found.high == pytest.approx(min(horizon, high))
    ordered = sorted(t if t <= horizon else math.inf for t in needed)
    middle = ordered[math.ceil(count / 2) - 1]
    assert found.median == (None if math.isinf(middle) else middle)


def test_a_run_that_fails_is_neither_dropped_nor_counted_as_a_success() -> None:
    some_fail = summarise(times([100, 120, 110], [300, 300]), 300)
    dropped = summarise(times([100, 120, 110]), 300)
    counted = summarise(times([100, 120, 110, 300, 300]), 300)
    assert dropped.mean == 110 < some_fail.mean == 186
    assert (some_fail.reached, counted.reached) == (3, 5)
    assert summarise(times([100], [300, 300, 300]), 300).median is None
    assert summarise(times([100, 120, 110], [300, 300, 300]), 300).median == 120
    assert summarise(times([], [300, 300]), 300).mean == 300
    alone = summarise(times([100]), 300)
    assert math.isnan(alone.low)
    with pytest.raises(ValueError, match="no runs"):
        kaplan_meier([])


def by_seed(reached: list[float | None]) -> dict[int, Time]:
    return {seed: Time(t or 300, t is not None) for seed, t in enumerate(reached)}


def test_pairs_are_compared_on_restricted_times() -> None:
    control = by_seed([200, None, 250, None, 220])
    candidate = by_seed([100, 120, 260, None, 110])
    (found,) = compare_times([(control, candidate)], 300)
    assert list(found.comparison.paired.differences) == [-100, -180, 10, 0, -110]
    needed = np.array([[100, 120, 260, 300, 110], [200, 300, 250, 300, 220]], dtype=float)
    expected = stats.ttest_rel(needed[0], needed[1])
    assert found.comparison.p == pytest.approx(expected.pvalue)
    assert (found.first, found.last, found.ties) == (3, 1, 1)
    assert found.sign_p == pytest.approx(stats.binomtest(3, 4).pvalue)


def test_the_sign_test_is_the_log_rank_test_with_seeds_as_strata() -> None:
    """Its statistic is the sum over strata of observed minus expected, over their variance."""
    control = by_seed([200, None, 250, None, 220, 130])
    candidate = by_seed([100, 120, 260, None, 110, 90])
    excess = variance = 0.0
    for seed in control:
        pair = [candidate[seed], control[seed]]
        for time in sorted({one.updates for one in pair if one.reached}):
            risk = [one.updates >= time for one in pair]
            if sum(risk) == 2:
                excess += (pair[0].reached and pair[0].updates == time) - 0.5
                variance += 0.25
    (found,) = compare_times([(control, candidate)], 300)
    assert excess**2 / variance == (found.first - found.last) ** 2 / (found.first + found.last)


def test_runs_that_were_not_watched_long_enough_are_refused() -> None:
    with pytest.raises(ValueError, match="watched for 150"):
        compare_times([({0: Time(150, False)}, {0: Time(100, True)})], 300)
    with pytest.raises(ValueError, match="no seed in common"):
        compare_times([({0: Time(100, True)}, {1: Time(100, True)})], 300)


def test_several_comparisons_are_adjusted_together() -> None:
    candidate = by_seed([100, 120, 110, 130, 105])
    slower = by_seed([200, 230, 205, 240, 195])
    same = by_seed([110, 110, 120, 120, 110])
    both = compare_times([(slower, candidate), (same, candidate)], 300)
    assert both[0].comparison.differs
    assert not both[1].comparison.differs
    (alone,) = compare_times([(slower, candidate)], 300)
    assert both[0].comparison.high > alone.comparison.high
