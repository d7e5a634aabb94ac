"""Score candidate rates by the plan's statistic, pick the best, write selection.json."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gomuon.lab.experiments import optimizers
from gomuon.lab.experiments.loss_windows import window_name
from gomuon.lab.experiments.plan import Plan, tuning_name
from gomuon.lab.experiments.selection import EXPERIMENT, FILE, FORMAT, Candidate
from gomuon.lab.files import write_json
from gomuon.lab.results.campaigns import Campaign
from gomuon.lab.results.runs import Run
from gomuon.lab.results.statistics import loss_score, run_result


@dataclass(frozen=True)
class Pick:
    """The candidates of one method, and the one it takes.

    Attributes:
        declared: a rate that the plan fixes; its candidates are run and shown, and none is picked.
    """

    method: str
    candidates: tuple[Candidate, ...]
    declared: float | None = None

    @property
    def taken(self) -> Candidate | None:
        """The best candidate, or the one at the declared rate."""
        if self.declared is None:
            return self.best
        return next((c for c in self.candidates if c.rate == self.declared), None)

    @property
    def rate(self) -> float | None:
        """The rate that is taken; None when every candidate diverged."""
        if self.declared is not None:
            return self.declared
        return None if self.best is None else self.best.rate

    @property
    def best(self) -> Candidate | None:
        """The usable candidate with the lowest score; None if all diverged."""
        usable = [candidate for candidate in self.candidates if candidate.usable]
        return min(usable, key=lambda c: (c.score, -(c.accuracy or 0.0)), default=None)

    @property
    def edge(self) -> str | None:
        """Which end of the grid the rate is: "lower", "upper", "only" (a single rate) or None."""
        if self.taken is None:
            return None
        rates = {candidate.rate for candidate in self.candidates}
        if len(rates) == 1:
            return "only"
        ends = {min(rates): "lower", max(rates): "upper"}
        return ends.get(self.taken.rate)

    def warning(self) -> str | None:
        """A warning if nothing was picked or the best rate may be outside the grid."""
        if self.declared is not None:
            return None
        name = optimizers.title(self.method)
        if self.best is None:
            return f"{name}: nothing picked, because every rate diverged; try lower rates"
        rate = f"{self.best.rate:g}"
        if self.edge == "only":
            return f"{name}: {rate} was the only rate tried, so others may be better"
        if self.edge is None:
            return None
        end, way = ("lowest", "lower") if self.edge == "lower" else ("highest", "higher")
        rates = sorted({candidate.rate for candidate in self.candidates})
        step = rates[0] / rates[1] if self.edge == "lower" else rates[-1] / rates[-2]
        beyond = sorted(self.best.rate * step**i for i in range(len(rates)))
        further = "/".join(f"{rate:.4g}" for rate in beyond)
        return (
            f"{name}: the best rate, {rate}, is the {end} of its grid, so a {way} one may be "
            f"better; try --optimizers {self.method} --rates {self.method}={further}"
        )


def score_candidate(
    arm: str,
    method: str,
    rate: float,
    momentum: float | None,
    runs: Sequence[Run],
    *,
    task: str,
    steps: int,
    seeds: int,
) -> Candidate:
    """Score an arm from the metrics of its runs; `seeds` is how many runs it needs."""
    known = [run for run in runs if run.result is not None]
    if len(known) < seeds:
        return Candidate(arm, method, rate, momentum, finished=False)
    results = [run_result(task, steps, run.metrics) for run in known]
    if task == "grokking":
        # A run that never groks counts as one update more than it made.
        scores: list[float | None] = [float(r["grok_step"] or steps + 1) for r in results]
        accuracy: float | None = _mean([r["final_test_accuracy"] or 0.0 for r in results])
    else:
        scores = [loss_score(result) for result in results]
        accuracy = None
    finite = [score for score in scores if score is not None and math.isfinite(score)]
    diverged = any("diverged_at" in (run.result or {}) for run in known)
    score = None if diverged or len(finite) < len(scores) else _mean(finite)
    return Candidate(arm, method, rate, momentum, score, accuracy, by_seed=tuple(finite))


def picks_of(plan: Plan, runs: Sequence[Run]) -> list[Pick]:
    """The scored candidates of each method of a sweep, in the plan's order."""
    found = []
    for arm in plan.arms:
        if arm.lr is None:
            raise ValueError(f"arm {arm.name!r} of a sweep has no rate")
        found.append(
            score_candidate(
                arm.name,
                arm.optimizer,
                arm.lr,
                arm.options.get("momentum"),
                [run for run in runs if run.config.arm == arm.name],
                task=plan.task,
                steps=plan.steps,
                seeds=len(plan.seeds),
            )
        )
    return group_by_method(found)


def picks_of_campaign(campaign: Campaign) -> list[Pick]:
    """The same for a sweep that was read back from its folder."""
    return group_by_method(
        score_candidate(
            arm.name,
            arm.optimizer,
            arm.rate or 0.0,
            arm.options.get("momentum"),
            list(arm.runs.values()),
            task=campaign.task,
            steps=campaign.steps,
            seeds=len(campaign.seeds),
        )
        for arm in campaign.arms
    )


def group_by_method(candidates: Iterable[Candidate]) -> list[Pick]:
    found: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        found.setdefault(candidate.method, []).append(candidate)
    return [Pick(method, tuple(tried)) for method, tried in found.items()]


def tuned_picks(plan: Plan, runs: Sequence[Run]) -> list[Pick]:
    """The scored candidates of each arm of an experiment that has a grid, on the tuning seed."""
    if plan.tuning_seed is None:
        return []
    picks = []
    for arm in plan.arms:
        names = {rate: tuning_name(arm, rate) for rate in arm.grid}
        candidates = tuple(
            score_candidate(
                name,
                arm.optimizer,
                rate,
                arm.options.get("momentum"),
                [run for run in runs if run.config.arm == name],
                task=plan.task,
                steps=plan.steps,
                seeds=1,
            )
            for rate, name in names.items()
        )
        if candidates:
            picks.append(Pick(arm.optimizer, candidates, declared=arm.lr))
    return picks


def screen(runs: Sequence[Run]) -> list[Pick]:
    """The screen of modular addition: per optimizer and rate the sum of grok steps over moduli.

    A run that never groks counts as one update more than it made.
    """
    sums: dict[str, dict[float, int]] = {}
    for run in runs:
        if run.result is not None:
            of_rate = sums.setdefault(run.config.optimizer, {})
            step = run.result["grok_step"] or run.config.steps + 1
            of_rate[run.config.lr] = of_rate.get(run.config.lr, 0) + step
    return [
        Pick(
            method,
            tuple(
                Candidate(f"{method}-{rate:g}", method, rate, score=float(total))
                for rate, total in of_rate.items()
            ),
        )
        for method, of_rate in sums.items()
    ]


def write_selection(folder: Path, plan: Plan, picks: Sequence[Pick]) -> Path:
    """Write ``selection.json``: the candidates, their scores and the rate each method takes."""
    methods = {}
    for pick in picks:
        taken = pick.taken
        methods[pick.method] = {
            "rate": pick.rate,
            "selected": pick.declared is None,
            "momentum": None if taken is None else taken.momentum,
            "statistic": None if taken is None else taken.score,
            "edge": pick.edge,
            "warning": pick.warning(),
            "candidates": [_entry(candidate) for candidate in pick.candidates],
            **_options(plan, pick.method),
        }
    path = folder / FILE
    write_json(
        path,
        {
            "format": FORMAT,
            "experiment": plan.experiment,
            "task": plan.task,
            "seeds": list(plan.seeds if plan.tuning_seed is None else (plan.tuning_seed,)),
            "steps": plan.steps,
            "windows": [window_name(window) for window in plan.windows],
            "statistic": plan.statistic,
            "rule": plan.rule,
            "settings": plan.settings,
            "order": list(methods),  # the user's order; keys in the file are sorted
            "methods": methods,
        },
    )
    return path


def _options(plan: Plan, method: str) -> dict[str, Any]:
    """Keywords that all arms of a sweep's method had, besides the momentum."""
    of_method = [arm.options for arm in plan.arms if arm.optimizer == method]
    keywords = {key: value for key, value in of_method[0].items() if key != "momentum"}
    return {"options": keywords} if keywords and plan.experiment == EXPERIMENT else {}


def _entry(candidate: Candidate) -> dict[str, Any]:
    entry = {
        "rate": candidate.rate,
        "momentum": candidate.momentum,
        "statistic": candidate.score,
        "diverged": candidate.score is None,
    }
    if candidate.accuracy is not None:
        entry["final_test_accuracy"] = candidate.accuracy
    return entry


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
