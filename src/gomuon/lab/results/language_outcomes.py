"""Outcomes of character models: the losses of each arm, its seeds, and the compared pairs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gomuon.lab import formatting as w
from gomuon.lab.errors import LabError
from gomuon.lab.experiments.loss_windows import PAPER_WINDOWS, window_name
from gomuon.lab.experiments.run_config import VALIDATION_LOSS, is_held_out
from gomuon.lab.results.campaigns import ArmRuns, Campaign
from gomuon.lab.results.runs import METRICS, Run
from gomuon.lab.results.statistics import language_result, loss_score, paired, score_name

GEOMETRIC_MEAN = "geometric mean"


@dataclass(frozen=True)
class Measure:
    """A column of the tables: a window's mean loss or the geometric mean of all windows."""

    title: str  # shown to the reader
    key: str  # in a run's outcome
    paper_key: str  # in the published results


@dataclass(frozen=True)
class PairedSeeds:
    """A paired comparison with the difference of each seed."""

    differences: dict[int, float]
    mean: float
    low: float
    high: float
    relative: float
    wins: int


@dataclass(frozen=True)
class LanguageOutcomes:
    """A campaign with its outcomes: arm name -> seed -> measure key -> loss."""

    campaign: Campaign
    measures: tuple[Measure, ...]
    deciding: Measure
    outcomes: dict[str, dict[int, dict[str, float]]]

    def mean(self, arm: ArmRuns, measure: Measure) -> float | None:
        """The mean over the seeds that every arm with results has finished."""
        seeds = self.common_seeds()
        values = [self.outcomes[arm.name].get(seed, {}).get(measure.key) for seed in seeds]
        known = [value for value in values if value is not None]
        return math.fsum(known) / len(known) if known else None

    def common_seeds(self) -> list[int]:
        """Seeds that are finished in every arm with results; arms are ranked on these only."""
        sets = [set(seeds) for seeds in self.outcomes.values() if seeds]
        return sorted(set.intersection(*sets)) if sets else []

    def ranked(self) -> list[tuple[ArmRuns, float]]:
        scored = [(arm, self.mean(arm, self.deciding)) for arm in self.campaign.arms]
        known = [(arm, value) for arm, value in scored if value is not None]
        return sorted(known, key=lambda pair: (math.isnan(pair[1]), pair[1]))

    def comparisons(self) -> list[tuple[ArmRuns, ArmRuns]]:
        """The declared pairs of control and candidate."""
        arm = self.campaign.arm
        return [(arm(first), arm(second)) for first, second in self.campaign.comparisons]

    def headline_pairs(self) -> list[tuple[ArmRuns, ArmRuns]]:
        """The pairs in the headline: in a race the first two, else the declared pairs."""
        ranking = [arm for arm, _ in self.ranked()]
        return (
            [(ranking[1], ranking[0])]
            if self.campaign.race and len(ranking) > 1
            else self.comparisons()
        )

    def paired(self, control: ArmRuns, candidate: ArmRuns, measure: Measure) -> PairedSeeds | None:
        first, second = self.outcomes[control.name], self.outcomes[candidate.name]
        seeds = [seed for seed in self.campaign.seeds if seed in first and seed in second]
        if not seeds:
            return None
        result = paired(
            [first[s][measure.key] for s in seeds], [second[s][measure.key] for s in seeds]
        )
        return PairedSeeds(
            dict(zip(seeds, result.differences, strict=True)),
            result.mean,
            result.low,
            result.high,
            result.relative,
            result.wins,
        )


def analyse(campaign: Campaign) -> LanguageOutcomes:
    measures = [
        # A shortened run has shorter windows; each is compared with the paper's window.
        Measure(w.window(window), window_name(window), window_name(original))
        for window, original in zip(campaign.windows, PAPER_WINDOWS, strict=False)
    ]
    mean = Measure(GEOMETRIC_MEAN, GEOMETRIC_MEAN, GEOMETRIC_MEAN)
    outcomes = {
        arm.name: {seed: outcome(run, campaign) for seed, run in arm.finished.items()}
        for arm in campaign.arms
    }
    windows_in_paper = {key for row in campaign.printed("windows").values() for key in row}
    held_out = Measure(score_name(campaign.task), VALIDATION_LOSS, VALIDATION_LOSS)
    has_held_out = is_held_out(campaign.task)
    deciding = held_out if has_held_out else mean
    if len(windows_in_paper) == 1:  # the paper judges this experiment by a single window
        deciding = next((m for m in measures if m.paper_key in windows_in_paper), mean)
    shown = (*measures, mean, held_out) if has_held_out else (*measures, mean)
    return LanguageOutcomes(campaign, shown, deciding, outcomes)


def outcome(run: Run, campaign: Campaign) -> dict[str, float]:
    try:
        result = language_result(run.metrics, campaign.windows)
    except (KeyError, TypeError, ValueError) as error:
        raise LabError(f"{run.folder / METRICS}: no loss for every window ({error})") from error
    found = {**result["windows"], GEOMETRIC_MEAN: result["geometric_mean"]}
    if is_held_out(campaign.task):
        found[VALIDATION_LOSS] = loss_score(result)
    # A diverged run has no mean for later windows; NaN ranks last.
    return {key: math.nan if value is None else value for key, value in found.items()}
