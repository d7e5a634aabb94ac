"""Several paired comparisons at once: p-values and intervals that hold for all of them together.

An interval of 95 % for one comparison misses one time in twenty, so among many comparisons some
misses are to be expected. Here the p-values are adjusted by Holm's method and the intervals are
widened by Bonferroni's: with 95 % confidence none of the family is wrong. Neither assumes anything
of how the comparisons depend on each other, and they do: all share the candidate's runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy import special

from gomuon.lab.results.statistics import Paired, paired


@dataclass(frozen=True)
class Comparison:
    """One comparison of a family.

    Attributes:
        paired: the comparison on its own.
        p: two-sided, of the paired t test; NaN if there is one pair only, or a run diverged.
        adjusted: the same for the whole family, by Holm's method.
        low, high: ends of the interval that holds for the whole family.
        family: the number of comparisons.
    """

    paired: Paired
    p: float
    adjusted: float
    low: float
    high: float
    family: int

    @property
    def differs(self) -> bool:
        """Whether the family's interval excludes zero."""
        return self.low > 0 or self.high < 0


def compare_all(
    pairs: Sequence[tuple[Sequence[float], Sequence[float]]],
    *,
    confidence: float = 0.95,
    family: int | None = None,
) -> list[Comparison]:
    """Compare each pair of (control, candidate), seed by seed.

    Args:
        pairs: the values of both arms, by seed.
        confidence: of all intervals together.
        family: how many comparisons could have been reported, if that is more than are given: the
            best two of m arms are one of m(m − 1)/2 pairs.
    """
    count = len(pairs) if family is None else family
    if count < len(pairs):
        raise ValueError(f"a family of {count} cannot have {len(pairs)} comparisons")
    found = [paired(control, candidate, confidence) for control, candidate in pairs]
    wide = [
        paired(control, candidate, 1 - (1 - confidence) / max(1, count))
        for control, candidate in pairs
    ]
    ps = [t_test(one.differences) for one in found]
    return [
        Comparison(alone, p, adjusted, together.low, together.high, count)
        for alone, p, adjusted, together in zip(found, ps, holm(ps, count), wide, strict=True)
    ]


def t_test(differences: Sequence[float]) -> float:
    """The two-sided p-value of Student's t test that the mean difference is zero."""
    count = len(differences)
    if count < 2 or not all(math.isfinite(d) for d in differences):
        return math.nan
    mean = math.fsum(differences) / count
    error = math.sqrt(math.fsum((d - mean) ** 2 for d in differences) / (count - 1) / count)
    if error == 0:  # the same difference on every seed
        return 1.0 if mean == 0 else 0.0
    return float(2 * special.stdtr(count - 1, -abs(mean / error)))


def holm(ps: Sequence[float], family: int | None = None) -> list[float]:
    """P-values adjusted for a family (Holm 1979); a comparison without one keeps NaN.

    It counts all the same: leaving it out would make the others look better than they are.
    """
    count = len(ps) if family is None else family
    order = sorted((p, index) for index, p in enumerate(ps) if not math.isnan(p))
    adjusted = [math.nan] * len(ps)
    highest = 0.0
    for rank, (p, index) in enumerate(order):
        highest = max(highest, min(1.0, (count - rank) * p))
        adjusted[index] = highest
    return adjusted


def sign_test(wins: int, losses: int) -> float:
    """The two-sided p-value that wins and losses are equally likely; ties count for nothing."""
    count = wins + losses
    if count == 0:
        return 1.0
    return min(1.0, float(2 * special.bdtr(min(wins, losses), count, 0.5)))
