"""Outcomes of character models: the losses of each arm, its seeds, and the compared pairs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gomuon.lab import formatting as w
from gomuon.lab.errors import LabError
from gomuon.lab.experiments.loss_windows import PAPER_WINDOWS, window_name
from gomuon.lab.experiments.run_config import VALIDATION_LOSS, is_held_out
from gomuon.lab.results.campaigns import ArmRuns, Campaign
from gomuon.lab.results.comparisons import Comparison, compare_all
from gomuon.lab.results.runs import METRICS, Run
from gomuon.lab.results.statistics import language_result, loss_score, paired, score_name
from gomuon.lab.results.survival import Time

GEOMETRIC_MEAN = "geometric mean"
TRAILING = 40  # of a run's length; one batch's loss may be low by chance


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

    def times(self, arm: ArmRuns, target: float) -> dict[int, Time]:
        """When each finished run reaches a loss; one that does not is censored at its length."""
        held_out, steps = self.deciding.key == VALIDATION_LOSS, self.campaign.steps
        found = {}
        for seed, run in arm.finished.items():
            courses = held_out_course(run) if held_out else trailing_course(run, steps)
            step = next((step for step, loss in courses if loss <= target), None)
            found[seed] = Time(steps, False) if step is None else Time(step, True)
        return found

    def compare_all(self) -> list[tuple[ArmRuns, ArmRuns, Comparison]]:
        """The declared pairs by the deciding measure, judged as one family."""
        pairs = [(c, d) for c, d in self.comparisons() if self._values(c, d) is not None]
        found = compare_all([self._values(c, d) or ((), ()) for c, d in pairs])
        return [(*pair, comparison) for pair, comparison in zip(pairs, found, strict=True)]

    def judge(self, control: ArmRuns, candidate: ArmRuns) -> Comparison | None:
        """A pair of the headline, by the deciding measure.

        A race's headline is about the two arms that came out first, so it is judged as one of all
        pairs of arms. An experiment's pairs were declared, each with its own interval.
        """
        values = self._values(control, candidate)
        if values is None:
            return None
        arms = len(self.ranked())
        (found,) = compare_all([values], family=arms * (arms - 1) // 2 if self.campaign.race else 1)
        return found

    def _values(
        self, control: ArmRuns, candidate: ArmRuns
    ) -> tuple[list[float], list[float]] | None:
        """The deciding measure of both arms on the seeds that both have finished."""
        first, second = self.outcomes[control.name], self.outcomes[candidate.name]
        seeds = [seed for seed in self.campaign.seeds if seed in first and seed in second]
        key = self.deciding.key
        return ([first[s][key] for s in seeds], [second[s][key] for s in seeds]) if seeds else None


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


def held_out_course(run: Run) -> list[tuple[int, float]]:
    """The steps of a run's evaluations, and their validation losses."""
    return [
        (int(line["step"]), float(line[VALIDATION_LOSS]))
        for line in run.metrics
        if VALIDATION_LOSS in line
    ]


def trailing_course(run: Run, steps: int) -> list[tuple[int, float]]:
    """The training loss at each step, averaged over the last fortieth of the run's length."""
    width = max(1, steps // TRAILING)
    losses = [float(line["loss"]) for line in run.metrics]
    return [
        (end, math.fsum(losses[end - width : end]) / width) for end in range(width, len(losses) + 1)
    ]


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
