"""Outcomes of modular addition: when each arm groks, and the compared pairs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from gomuon.lab.errors import LabError
from gomuon.lab.results.campaigns import ArmRuns, Campaign
from gomuon.lab.results.runs import METRICS, Run
from gomuon.lab.results.statistics import grokking_result
from gomuon.lab.results.survival import Time, TimesCompared, compare_times

NEVER = math.inf  # the grok step of a run that does not grok


@dataclass(frozen=True)
class GrokOutcomes:
    """A campaign with its outcomes: arm name -> seed -> `grokking_result` of the run."""

    campaign: Campaign
    outcomes: dict[str, dict[int, dict[str, Any]]]

    def common_seeds(self, group: str) -> list[int]:
        """Seeds that are finished in every arm with results; arms are ranked on these only."""
        found = [set(self.outcomes[arm.name]) for arm in self.campaign.members(group)]
        sets = [seeds for seeds in found if seeds]
        return sorted(set.intersection(*sets)) if sets else []

    def ranked_outcomes(self, arm: ArmRuns) -> list[dict[str, Any]]:
        """The outcomes of an arm on the common seeds of its group."""
        outcomes = self.outcomes[arm.name]
        return [outcomes[seed] for seed in self.common_seeds(arm.group) if seed in outcomes]

    def mean_grok_step(self, arm: ArmRuns) -> float | None:
        """The mean grok step over seeds; NEVER if the arm groks on no seed or diverges on one.

        A run that does not grok counts as one update more than the run has; then the mean is a
        lower bound. docs/reproduction.md uses the same rule.
        """
        found = [outcome["grok_step"] for outcome in self.ranked_outcomes(arm)]
        if not found:
            return None
        if all(step is None for step in found) or self.diverged(arm) is not None:
            return NEVER
        beyond = self.campaign.steps + 1
        return math.fsum(beyond if step is None else step for step in found) / len(found)

    def grok_step_text(self, arm: ArmRuns) -> str:
        """The mean grok step as text, as a lower bound if a seed did not grok."""
        step = self.mean_grok_step(arm)
        if step is None or math.isinf(step):
            return "never"
        if self.all_grokked(arm):
            return f"{step:,.0f}"
        found = [
            outcome["grok_step"] or self.campaign.steps for outcome in self.ranked_outcomes(arm)
        ]
        return f"over {math.fsum(found) / len(found):,.0f}"

    def all_grokked(self, *arms: ArmRuns) -> bool:
        """Whether every run of these arms grokked and none diverged."""
        found = [outcome["grok_step"] for arm in arms for outcome in self.ranked_outcomes(arm)]
        return None not in found and all(self.diverged(arm) is None for arm in arms)

    def ranked(self, arms: list[ArmRuns]) -> list[tuple[ArmRuns, float]]:
        """Arms sorted by grok step; those that never grok by their final accuracy."""
        known = [(arm, step) for arm in arms if (step := self.mean_grok_step(arm)) is not None]
        return sorted(known, key=lambda pair: (pair[1], -self.final_accuracy(pair[0])))

    def final_accuracy(self, arm: ArmRuns) -> float:
        values = [outcome["final_test_accuracy"] or 0.0 for outcome in self.ranked_outcomes(arm)]
        return math.fsum(values) / len(values) if values else 0.0

    def times(self, arm: ArmRuns) -> dict[int, Time]:
        """When each finished run groks.

        One that does not is censored at the planned length. So is one that diverged: it made fewer
        updates, but it is known that more of them would not have helped.
        """
        found = self.outcomes[arm.name]
        return {
            seed: Time(self.campaign.steps, False)
            if outcome["grok_step"] is None
            else Time(outcome["grok_step"], True)
            for seed, outcome in found.items()
        }

    def judge(self, control: ArmRuns, candidate: ArmRuns) -> TimesCompared | None:
        """The two arms that came out first in a race, judged as one of all pairs of arms."""
        first, second = self.times(control), self.times(candidate)
        if not set(first) & set(second):
            return None
        arms = len(self.ranked(self.campaign.members(candidate.group)))
        family = arms * (arms - 1) // 2 if self.campaign.race else 1
        (found,) = compare_times([(first, second)], self.campaign.steps, family=family)
        return found

    def comparisons(self) -> list[tuple[ArmRuns, ArmRuns]]:
        """The declared pairs of control and candidate."""
        campaign = self.campaign
        return [(campaign.arm(a), campaign.arm(b)) for a, b in campaign.comparisons]

    def headline_pairs(self) -> list[tuple[ArmRuns, ArmRuns]]:
        """The pairs in the headline: in a race the first two, else the declared pairs."""
        ranking = [arm for arm, _ in self.ranked(list(self.campaign.arms))]
        if self.campaign.race and len(ranking) > 1:
            return [(ranking[1], ranking[0])]
        return self.comparisons()

    def diverged(self, arm: ArmRuns) -> int | None:
        """The earliest update at which a run of the arm diverged."""
        results = [run.result or {} for run in arm.finished.values()]
        return min((int(r["diverged_at"]) for r in results if "diverged_at" in r), default=None)


def analyse(campaign: Campaign) -> GrokOutcomes:
    return GrokOutcomes(
        campaign,
        {
            arm.name: {seed: outcome(run) for seed, run in arm.finished.items()}
            for arm in campaign.arms
        },
    )


def outcome(run: Run) -> dict[str, Any]:
    try:
        return grokking_result(run.metrics)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise LabError(f"{run.folder / METRICS}: a line has no accuracies ({error})") from error
