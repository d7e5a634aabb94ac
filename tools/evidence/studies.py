"""A collected campaign and the figures that the page reads from it."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gomuon.lab.experiments.selection import Selection
from gomuon.lab.results.campaigns import ArmRuns, Campaign
from gomuon.lab.results.runs import Run
from gomuon.lab.results.statistics import loss_score
from tools.evidence.thinned_curve import Curve

# The names of the measures beside those of the windows.
TRAJECTORY, HELD_OUT = "geometric mean", "validation loss"


@dataclass(frozen=True)
class Study:
    """A campaign of ``results/`` with everything its folder holds.

    Attributes:
        name: its folder.
        plan: plan.json as it was declared.
        curves: run folder's name -> curve, for those runs that have one.
        selection: selection.json, or None.
    """

    name: str
    campaign: Campaign
    plan: dict[str, Any]
    curves: dict[str, Curve]
    selection: Selection | None

    @property
    def runs(self) -> list[Run]:
        found = [run for arm in self.campaign.arms for run in arm.runs.values()]
        return [*self.campaign.tuning, *found]

    @property
    def command(self) -> str | None:
        """The command that started the campaign; None if plan.json does not record it."""
        argv = self.plan.get("argv")
        return None if argv is None else shlex.join(["gomuon", *argv])

    @property
    def declared(self) -> int:
        """How many runs the plan asks for."""
        tuned = self.plan.get("tuning_seed") is not None
        grids = sum(len(arm.get("grid", ())) for arm in self.plan["arms"]) if tuned else 0
        return grids + len(self.campaign.arms) * len(self.campaign.seeds)

    @property
    def shortcoming(self) -> str | None:
        """Why nothing may be concluded from it yet; None when all of it has run."""
        if self.campaign.label != "full":
            return "only a quick run"
        made = len(self.runs)
        return None if made == self.declared else f"{made} of {self.declared} runs so far"

    def complete(self, arms: Sequence[str]) -> bool:
        """Whether every run of these arms is there, though others may be missing."""
        if self.campaign.label != "full" or not self.has(*arms):
            return False
        return self.seeds_of(*arms) == list(self.campaign.seeds)

    def has(self, *arms: str) -> bool:
        known = {arm.name for arm in self.campaign.arms}
        return known.issuperset(arms)

    def arm(self, name: str) -> ArmRuns:
        return self.campaign.arm(name)

    def curve(self, run: Run) -> Curve | None:
        return self.curves.get(run.folder.name)

    def seeds_of(self, *arms: str) -> list[int]:
        """The seeds that all of these arms have finished."""
        common = [set(self.arm(name).finished) for name in arms]
        return [seed for seed in self.campaign.seeds if all(seed in seeds for seeds in common)]

    def losses(self, arm: str, measure: str, seeds: Sequence[int]) -> list[float]:
        """The measure, a window's name or the geometric mean, on each seed; NaN if it diverged."""
        return [recorded_loss(self.arm(arm).runs[seed], measure) for seed in seeds]

    def grok_steps(self, arm: str) -> dict[int, int | None]:
        return {seed: recorded_grok_step(run) for seed, run in self.arm(arm).finished.items()}

    def opposing_steps(self, arm: str) -> list[tuple[int, int]]:
        """Per seed, how many steps opposed their source and how many their gradient.

        Only of the runs that counted them.
        """
        if not self.has(arm):
            return []
        results = [run.result or {} for run in self.arm(arm).finished.values()]
        return [
            (int(result["negative_source"]), int(result["negative_gradient"]))
            for result in results
            if "negative_source" in result and "negative_gradient" in result
        ]


Evidence = Mapping[str, Study]


def recorded_loss(run: Run, measure: str) -> float:
    """A window's mean, that of all windows, or the loss on held-out text; NaN if it diverged."""
    result = run.result or {}
    if measure in (TRAJECTORY, HELD_OUT):
        value = loss_score(result) if measure == HELD_OUT else result.get("geometric_mean")
    else:
        value = result["windows"][measure]
    return math.nan if value is None else float(value)


def recorded_grok_step(run: Run) -> int | None:
    """The update at which a run of modular addition grokked, or None if it never did."""
    step: int | None = (run.result or {})["grok_step"]
    return step


def final_accuracy(run: Run) -> float | None:
    """The share of held-out pairs that is right at the last evaluation; None if there was none."""
    share: float | None = (run.result or {})["final_test_accuracy"]
    return share


def evaluations_below(run: Run) -> tuple[list[int], int]:
    """Of a run that grokked: the later updates at which it is below 99 %, of how many later ones.

    Only updates at which it was evaluated count.
    """
    grokked = recorded_grok_step(run)
    if grokked is None:
        return [], 0
    result = run.result or {}
    later = (result["steps"] - grokked) // run.config.evaluate_every
    return list(result.get("retention_failures") or []), later


def score(run: Run) -> float | None:
    """The statistic by which sweeps select and races rank a run; None if it diverged."""
    result = run.result or {}
    if "diverged_at" in result:
        return None
    if run.config.task == "grokking":
        # A run that never groks counts as one update more than it made.
        return float(recorded_grok_step(run) or run.config.steps + 1)
    value = loss_score(result)
    return None if value is None or not math.isfinite(value) else float(value)
