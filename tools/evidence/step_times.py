"""Times of whole steps, measured with the arms taking turns, as ratios of one arm to another."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gomuon.lab.results.statistics import compare_times
from tools.evidence.estimates import estimate
from tools.evidence.studies import Study


@dataclass(frozen=True)
class StepTimeRatio:
    """How long one arm's step takes, in steps of another arm.

    Attributes:
        mean: geometric mean over cycles; of the arms' mean steps where cycles do not match.
        low: end of the 95 % interval of the mean; NaN where cycles do not match.
        high: the other end.
        spread: one standard deviation of a cycle's ratio, as a factor; None in that case.
        cycles: how many there were.
    """

    mean: float
    low: float
    high: float
    spread: float | None
    cycles: int


@dataclass(frozen=True)
class StepTimes:
    """Arm -> mean seconds of a whole step, cycle by cycle."""

    seconds: Mapping[str, Sequence[float]]

    @classmethod
    def of(cls, study: Study) -> StepTimes | None:
        """The timing of a campaign; None if it has none."""
        found = study.campaign.timing
        return None if found is None else cls(found)

    def ratio(self, control: str, candidate: str) -> StepTimeRatio | None:
        """How long the candidate's step takes in those of the control; None if one is missing."""
        if control not in self.seconds or candidate not in self.seconds:
            return None
        a, b = self.seconds[control], self.seconds[candidate]
        found = compare_times(a, b)
        low = high = math.nan
        if found.spread is not None:
            logs = estimate([math.log(y / x) for x, y in zip(a, b, strict=True)])
            low, high = math.exp(logs.low), math.exp(logs.high)
        return StepTimeRatio(found.mean, low, high, found.spread, found.cycles)

    def seconds_of(self, arm: str) -> float:
        """Mean seconds of a whole step."""
        taken = self.seconds[arm]
        return math.fsum(taken) / len(taken)
