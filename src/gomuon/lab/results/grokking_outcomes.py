"""The outcomes of modular addition: when each arm grokked, and who is compared."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from gomuon.lab.errors import LabError
from gomuon.lab.results.campaigns import ArmRuns, Campaign
from gomuon.lab.results.runs import METRICS, Run
from gomuon.lab.results.statistics import grokking_result

NEVER = math.inf  # the grok step of a run that does not grok


@dataclass(frozen=True)
class GrokOutcomes:
    """A campaign with its outcomes: arm name -> seed -> what `statistics` says of the run."""

    campaign: Campaign
    outcomes: dict[str, dict[int, dict[str, Any]]]

    def common_seeds(self, group: str) -> list[int]:
        """Arms are ranked on the same seeds only; an arm without results does not count."""
        found = [set(self.outcomes[arm.name]) for arm in self.campaign.members(group)]
        sets = [seeds for seeds in found if seeds]
        return sorted(set.intersection(*sets)) if sets else []

    def ranked_outcomes(self, arm: ArmRuns) -> list[dict[str, Any]]:
        """The outcomes of the arm on its group's common seeds."""
        outcomes = self.outcomes[arm.name]
        return [outcomes[seed] for seed in self.common_seeds(arm.group) if seed in outcomes]

    def mean_grok_step(self, arm: ArmRuns) -> float | None:
        """The mean grok step over seeds; NEVER if it groks on none of them, or diverges on one.

        A run that does not grok counts as one update more than it could make, so that the mean is
        then a bound; the page of the evidence ranks by the same.
        """
        found = [outcome["grok_step"] for outcome in self.ranked_outcomes(arm)]
        if not found:
            return None
        if all(step is None for step in found) or self.diverged(arm) is not None:
            return NEVER
        beyond = self.campaign.steps + 1
        return math.fsum(beyond if step is None else step for step in found) / len(found)

    def grok_step_text(self, arm: ArmRuns) -> str:
        """The mean grok step in words, as a bound where a seed did not grok."""
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
        """Whether every run of these arms grokked and lasted, so that their means are no bounds."""
        found = [outcome["grok_step"] for arm in arms for outcome in self.ranked_outcomes(arm)]
        return None not in found and all(self.diverged(arm) is None for arm in arms)

    def ranked(self, arms: list[ArmRuns]) -> list[tuple[ArmRuns, float]]:
        """By grok step; those that never grok by the accuracy they end with."""
        known = [(arm, step) for arm in arms if (step := self.mean_grok_step(arm)) is not None]
        return sorted(known, key=lambda pair: (pair[1], -self.final_accuracy(pair[0])))

    def final_accuracy(self, arm: ArmRuns) -> float:
        values = [outcome["final_test_accuracy"] or 0.0 for outcome in self.ranked_outcomes(arm)]
        return math.fsum(values) / len(values) if values else 0.0

    def comparisons(self) -> list[tuple[ArmRuns, ArmRuns]]:
        """The declared pairs of control and candidate."""
        campaign = self.campaign
        return [(campaign.arm(a), campaign.arm(b)) for a, b in campaign.comparisons]

    def headline_pairs(self) -> list[tuple[ArmRuns, ArmRuns]]:
        """The pairs the headline is about: in a race the winner and the runner-up."""
        ranking = [arm for arm, _ in self.ranked(list(self.campaign.arms))]
        if self.campaign.race and len(ranking) > 1:
            return [(ranking[1], ranking[0])]
        return self.comparisons()

    def diverged(self, arm: ArmRuns) -> int | None:
        """The earliest update at which a run of the arm stopped being a number."""
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
        raise LabError(f"{run.folder / METRICS}: a line lacks its accuracies ({error})") from error
