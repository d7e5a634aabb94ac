"""Rank the methods of a race by their mean over seeds."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gomuon.lab.experiments import optimizers
from gomuon.lab.results.campaigns import ArmRuns
from tools.evidence.studies import (
    Study,
    evaluations_below,
    final_accuracy,
    recorded_grok_step,
    score,
)


@dataclass(frozen=True)
class RankedMethod:
    """A method's outcome in a race; the mean decides the rank, lower is better.

    Attributes:
        values: one per seed: geometric mean of the windows, or grok step; a run that never groks
            counts as one update more than it made, one that diverged as infinite.
        grokked: in how many runs it grokked; None for the corpora.
        accuracy: held-out accuracy at the end, by which ties are broken.
        below: evaluations below 99 % after a run had grokked, and all evaluations after that.
    """

    arm: ArmRuns
    values: tuple[float, ...]
    grokked: int | None = None
    accuracy: float = 0.0
    below: tuple[int, int] = (0, 0)

    @property
    def mean(self) -> float:
        return math.fsum(self.values) / len(self.values)

    @property
    def mean_is_exact(self) -> bool:
        """Whether the mean is exact; it is a lower bound where a run never groks."""
        return self.grokked in (None, len(self.values))

    @property
    def name(self) -> str:
        return optimizers.title(self.arm.optimizer)


def ranking(study: Study) -> list[RankedMethod]:
    """The arms that have finished on every seed, best first."""
    whole = [arm for arm in study.campaign.arms if len(arm.finished) == len(study.campaign.seeds)]
    methods = (_ranked(study, arm) for arm in whole)
    return sorted(methods, key=lambda method: (method.mean, -method.accuracy))


def _ranked(study: Study, arm: ArmRuns) -> RankedMethod:
    runs = list(arm.finished.values())
    values = tuple(math.inf if value is None else value for value in map(score, runs))
    if study.campaign.task != "grokking":
        return RankedMethod(arm, values)
    grokked = sum(recorded_grok_step(run) is not None for run in runs)
    finals = [final_accuracy(run) or 0.0 for run in runs]
    again = [evaluations_below(run) for run in runs]
    below = sum(len(failures) for failures, _ in again), sum(later for _, later in again)
    return RankedMethod(arm, values, grokked, math.fsum(finals) / len(finals), below)
