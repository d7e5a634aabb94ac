"""Whole-step times that were measured interleaved, as ratios of one arm to another."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gomuon.lab.errors import LabError
from gomuon.lab.evidence.numbers import estimate
from gomuon.lab.evidence.reading import Study
from gomuon.lab.gather import TIMING
from gomuon.lab.statistics import compare_times


@dataclass(frozen=True)
class Ratio:
    """A ratio of step times.

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
class Timing:
    """timing.json: arm -> mean seconds of a whole step, cycle by cycle."""

    seconds: Mapping[str, Sequence[float]]

    @classmethod
    def of(cls, study: Study) -> Timing | None:
        """The timing of a campaign; None if it has none.

        Raises:
            LabError: the file does not hold positive seconds for each of its arms.
        """
        content = study.campaign.timing
        if content is None:
            return None
        path = study.campaign.folder / TIMING
        try:
            names = [str(name) for name in content["arms"]]
            values = [[float(x) for x in of_arm] for of_arm in content["seconds"]]
            seconds = dict(zip(names, values, strict=True))
        except (KeyError, TypeError, ValueError) as error:
            raise LabError(f"{path}: not an interleaved timing ({error!r})") from error
        for name, taken in seconds.items():
            if not taken or not all(0 < x < math.inf for x in taken):
                raise LabError(f"{path}: the seconds of {name} are {taken!r}, not positive times")
        return cls(seconds)

    def ratio(self, control: str, candidate: str) -> Ratio | None:
        """How long the candidate's step takes in those of the control; None if one is missing."""
        if control not in self.seconds or candidate not in self.seconds:
            return None
        a, b = self.seconds[control], self.seconds[candidate]
        found = compare_times(a, b)
        low = high = math.nan
        if found.spread is not None:
            logs = estimate([math.log(y / x) for x, y in zip(a, b, strict=True)])
            low, high = math.exp(logs.low), math.exp(logs.high)
        return Ratio(found.mean, low, high, found.spread, found.cycles)

    def step(self, arm: str) -> float:
        """Mean seconds of a whole step."""
        taken = self.seconds[arm]
        return math.fsum(taken) / len(taken)
