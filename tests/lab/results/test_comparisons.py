"""Families of comparisons, against scipy, the definition of Holm's method, and simulation."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from scipy import stats

from gomuon.lab.results.comparisons import compare_all, holm, sign_test, t_test

P_VALUES = some.lists(some.floats(0, 1), min_size=1, max_size=5)


@given(some.integers(0, 2**32), some.integers(2, 12))
@settings(max_examples=30)
def test_p_values_and_intervals_are_scipys(seed: int, count: int) -> None:
    draw = np.random.default_rng(seed)
    control = draw.normal(2, 0.1, count)
    candidates = [control + draw.normal(0.05, 0.1, count) for _ in range(3)]
    found = compare_all([(list(control), list(one)) for one in candidates])
    for comparison, candidate in zip(found, candidates, strict=True):
        test = stats.ttest_rel(candidate, control)
        assert comparison.p == pytest.approx(test.pvalue, rel=1e-9)
        alone, together = (test.confidence_interval(level) for level in (0.95, 1 - 0.05 / 3))
        assert (comparison.paired.low, comparison.paired.high) == pytest.approx(tuple(alone))
        assert (comparison.low, comparison.high) == pytest.approx(tuple(together))


@given(P_VALUES)
def test_holm_is_the_closed_test_of_bonferroni(ps: list[float]) -> None:
    """A hypothesis is rejected if every intersection that has it is, by Bonferroni's test."""
    indices = range(len(ps))
    for index, adjusted in zip(indices, holm(ps), strict=True):
        closed = max(
            min(1.0, size * min(ps[i] for i in group))
            for size in range(1, len(ps) + 1)
            for group in itertools.combinations(indices, size)
            if index in group
        )
        assert adjusted == pytest.approx(closed)


def test_holm_by_hand_and_with_a_comparison_that_has_no_p_value() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    lost = holm([0.01, math.nan, 0.03])
    assert lost[0] == pytest.approx(0.03), "the lost one still counts"
    assert math.isnan(lost[1])
    assert lost[2] == pytest.approx(0.06)
    assert holm([0.01], family=10) == pytest.approx([0.1])


def test_the_family_is_right_as_often_as_it_says() -> None:
    """Four candidates that do not differ from the control: some interval alone misses often."""
    draw = random.Random(0)
    alone = together = adjusted = 0
    rounds = 1500
    for _ in range(rounds):
        candidate = [draw.gauss(0, 1) for _ in range(5)]
        controls = [[draw.gauss(0, 1) for _ in range(5)] for _ in range(4)]
        found = compare_all([(control, candidate) for control in controls])
        alone += any(one.paired.low > 0 or one.paired.high < 0 for one in found)
        together += any(one.differs for one in found)
        adjusted += any(one.adjusted < 0.05 for one in found)
    assert alone / rounds > 0.1
    assert together / rounds < 0.06
    assert together == adjusted, "the smallest p-value is adjusted as Bonferroni's is"


def test_one_pair_equal_differences_and_diverged_runs() -> None:
    assert math.isnan(t_test([0.3]))
    assert math.isnan(t_test([0.3, math.nan]))
    assert t_test([0.0, 0.0]) == 1.0
    assert t_test([0.5, 0.5]) == 0.0
    with pytest.raises(ValueError, match="family of 1"):
        compare_all([([1.0], [2.0]), ([1.0], [3.0])], family=1)


@given(some.integers(0, 12), some.integers(0, 12))
def test_the_sign_test_is_scipys_binomial_test(wins: int, losses: int) -> None:
    expected = stats.binomtest(wins, wins + losses).pvalue if wins + losses else 1.0
    assert sign_test(wins, losses) == pytest.approx(expected)
