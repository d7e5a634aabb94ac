"""Read campaigns back from ``results/``, each held to its plan, to its curves and to itself.

Whatever contradicts itself is refused by file and value, so that the page may trust the rest.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gomuon.lab.errors import LabError
from gomuon.lab.evidence import slots
from gomuon.lab.evidence.slots import SLOTS
from gomuon.lab.evidence.thinning import CURVE, Curve, read_curve
from gomuon.lab.experiments.loss_windows import window_name, windows_for
from gomuon.lab.files import read_json
from gomuon.lab.results.campaigns import PLAN, ArmRuns, Campaign, read_campaign
from gomuon.lab.results.pairing import require_pair
from gomuon.lab.results.runs import MANIFEST, RESULT, Run, is_finished, read_manifest
from gomuon.lab.results.statistics import (
    GROK_THRESHOLD,
    first_reaching,
    geometric_mean,
    grok_step,
    retention_failures,
)

SELECTION = "selection.json"
TRAJECTORY = "geometric mean"
WINDOW_TOLERANCE = 1e-5  # a mean of values rounded to five decimals
EXACT = 1e-9


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
    selection: dict[str, Any] | None

    @property
    def runs(self) -> list[Run]:
        found = [run for arm in self.campaign.arms for run in arm.runs.values()]
        return [*self.campaign.tuning, *found]

    @property
    def declared(self) -> int:
        """How many runs the plan asks for."""
        tuned = self.plan.get("tuning_seed") is not None
        grids = sum(len(arm.get("grid", ())) for arm in self.plan["arms"]) if tuned else 0
        return grids + len(self.campaign.arms) * len(self.campaign.seeds)

    @property
    def shortcoming(self) -> str | None:
        """Why nothing may be concluded from it yet; None when it is whole."""
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
        """The seeds all of these arms have finished."""
        common = [set(self.arm(name).finished) for name in arms]
        return [seed for seed in self.campaign.seeds if all(seed in seeds for seeds in common)]

    def losses(self, arm: str, measure: str, seeds: Sequence[int]) -> list[float]:
        """The measure, a window's name or the geometric mean, on each seed; NaN if it diverged."""
        return [measured(self.arm(arm).runs[seed], measure) for seed in seeds]

    def grok_steps(self, arm: str) -> dict[int, int | None]:
        return {seed: grokked_at(run) for seed, run in self.arm(arm).finished.items()}


Evidence = Mapping[str, Study]


def measured(run: Run, measure: str) -> float:
    result = run.result or {}
    value = result.get("geometric_mean") if measure == TRAJECTORY else result["windows"][measure]
    return math.nan if value is None else float(value)


def grokked_at(run: Run) -> int | None:
    """The update at which a run of modular addition grokked, or None if it never did."""
    step: int | None = (run.result or {})["grok_step"]
    return step


def held_out_at_end(run: Run) -> float | None:
    """The share of held-out pairs it has right at its last evaluation; None if it made none."""
    share: float | None = (run.result or {})["final_test_accuracy"]
    return share


def below_again(run: Run) -> tuple[list[int], int]:
    """Where a run that grokked fell below 99 % again, and how often it was evaluated after."""
    grokked = grokked_at(run)
    if grokked is None:
        return [], 0
    result = run.result or {}
    later = (result["steps"] - grokked) // run.config.evaluate_every
    return list(result.get("retention_failures") or []), later


def read_evidence(results: Path) -> dict[str, Study]:
    """Every campaign that is there, in the page's order."""
    return {
        name: read_study(results / name, name)
        for name in SLOTS
        if (results / name / PLAN).is_file()
    }


def read_study(folder: Path, name: str) -> Study:
    """One campaign folder.

    Raises:
        LabError: it declares another campaign, or something in it contradicts something else.
    """
    slot, plan = slots.find(name), read_json(folder / PLAN)
    for field, wanted in (("experiment", slot.experiment), ("task", slot.task)):
        if plan.get(field) != wanted:
            raise LabError(
                f"{folder / PLAN}: its {field} is {plan.get(field)!r}, but {name} is the place of "
                f"{wanted!r}; give the campaign's own name with --name"
            )
    campaign = read_campaign(folder, load=load_thin)
    if campaign.foreign:
        raise LabError(f"{folder / 'runs' / campaign.foreign[0]} does not belong to {PLAN}")
    selection = folder / SELECTION
    study = Study(
        name,
        campaign,
        plan,
        {},
        read_json(selection) if selection.is_file() else None,
    )
    check_settings(study)
    for run in study.runs:
        curve = read_curve(run.folder)
        check_result(run, curve)
        if curve is not None:
            study.curves[run.folder.name] = curve
    for first, second in zip(campaign.tuning, campaign.tuning[1:], strict=False):
        require_pair(first, second)
    if slot.experiment == "tune" and study.selection is not None:
        check_selection(study, selection)
    return study


def load_thin(folder: Path) -> Run:
    """A run without its metrics; only finished ones are collected."""
    manifest = read_manifest(folder)
    if not is_finished(folder):
        raise LabError(f"{folder} has no {RESULT}; only finished runs belong here, collect again")
    result = read_json(folder / RESULT)
    if not isinstance(result.get("steps"), int):
        raise LabError(f"{folder / RESULT}: steps is {result.get('steps')!r}, not a number")
    return Run.from_manifest(folder, manifest, result, metrics=[], timing=[])


def check_settings(study: Study) -> None:
    """Every run has the settings its plan declares for its arm, the tuning runs as well."""
    declared = {str(arm["name"]): arm for arm in study.plan["arms"]}
    filed = [(arm.name, run) for arm in study.campaign.arms for run in arm.runs.values()]
    filed += [(run.config.arm.rpartition("-lr")[0], run) for run in study.campaign.tuning]
    for name, run in filed:
        arm = declared[name]
        wanted = {**study.plan["settings"], **arm["settings"], "threads": study.plan["threads"]}
        wanted |= {"task": study.plan["task"], "steps": study.plan["steps"]}
        wanted |= {"optimizer": arm["optimizer"], "options": arm["options"]}
        for field, value in wanted.items():
            found = getattr(run.config, field)
            if found != value:
                raise LabError(
                    f"{run.folder / MANIFEST}: its {field} is {found!r}, "
                    f"but {PLAN} declares {value!r}"
                )


def check_result(run: Run, curve: Curve | None) -> None:
    """A result agrees with itself and, as far as a thinned curve can tell, with its curve."""
    result = run.result or {}
    differ = functools.partial(_differ, run.folder / RESULT)
    steps = result.get("steps")
    if "diverged_at" not in result:
        differ("steps", steps, run.config.steps, f"{MANIFEST} says")
    if curve is not None:
        differ("steps", steps, curve.updates, f"{CURVE} has")
    if run.config.task == "grokking":
        _check_grokking(result, curve, differ)
    else:
        _check_language(run, result, curve, differ)


Differ = Callable[..., None]


def _check_language(
    run: Run, result: Mapping[str, Any], curve: Curve | None, differ: Differ
) -> None:
    found = _entry(run, result, "windows")
    windows = windows_for(run.config.steps)
    names = [window_name(window) for window in windows]
    differ("windows", sorted(found), sorted(names), "the windows of its length are")
    means = [found[name] for name in names]
    if None not in means:
        whole = geometric_mean([float(mean) for mean in means])
        differ("geometric_mean", result.get("geometric_mean"), whole, "its windows give", EXACT)
    for window in windows if curve is not None else ():
        mean = None if curve is None else curve.mean(*window)
        if mean is not None:
            name = window_name(window)
            differ(f"window {name}", found[name], mean, f"{CURVE} gives", WINDOW_TOLERANCE)


def _check_grokking(result: Mapping[str, Any], curve: Curve | None, differ: Differ) -> None:
    grokked, fitted = result.get("grok_step"), result.get("train_99_step")
    delay = None if grokked is None or fitted is None else grokked - fitted
    differ("delay", result.get("delay"), delay, "its grok and train steps give")
    if curve is None:
        return
    points = curve.test_points
    differ("grok_step", grokked, grok_step(points), f"{CURVE} gives")
    failures = retention_failures(points, grokked)
    differ("retention_failures", result.get("retention_failures"), failures, f"{CURVE} gives")
    seen = first_reaching(curve.train_points)
    if seen is not None and (fitted is None or fitted > seen):
        accuracy = f"{CURVE} reaches {GROK_THRESHOLD:.0%} at"
        differ("train_99_step", fitted, seen, accuracy)


def _entry(run: Run, result: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = result.get(name)
    if not isinstance(found, dict):
        raise LabError(f"{run.folder / RESULT}: {name!r} is missing; collect the campaign again")
    return found


def _differ(
    path: Path, name: str, found: Any, expected: Any, who: str, tolerance: float = 0.0
) -> None:
    """Raise a LabError that names the file and both values, unless they agree."""
    if isinstance(found, int | float) and isinstance(expected, int | float):
        if abs(found - expected) <= tolerance:
            return
    elif found == expected:
        return
    raise LabError(
        f"{path}: {name} is {found!r}, but {who} {expected!r}; collect the campaign again"
    )


def score(run: Run) -> float | None:
    """The statistic by which sweeps select and races rank a run; None if it diverged."""
    result = run.result or {}
    if "diverged_at" in result:
        return None
    if run.config.task == "grokking":
        return float(grokked_at(run) or run.config.steps + 1)
    value = result["geometric_mean"]
    return None if value is None or not math.isfinite(value) else float(value)


def check_selection(study: Study, path: Path) -> None:
    """What a sweep says it scored is what its runs say, and what it picked is their best."""
    methods = (study.selection or {}).get("methods")
    if not isinstance(methods, dict):
        raise LabError(f"{path}: 'methods' is missing or not an object")
    found: dict[tuple[str, float, float | None], float | None] = {}
    for arm in study.campaign.arms:
        if len(arm.finished) < len(study.campaign.seeds):
            continue
        scores = [score(run) for run in arm.finished.values()]
        known = [value for value in scores if value is not None]
        mean = math.fsum(known) / len(known) if len(known) == len(scores) else None
        found[arm.optimizer, float(arm.rate or 0), arm.options.get("momentum")] = mean
    for method, entry in methods.items():
        for candidate in entry["candidates"]:
            key = (method, float(candidate["rate"]), candidate["momentum"])
            if key in found:
                name = f"statistic of {method} at {candidate['rate']:g}"
                _differ(path, name, candidate["statistic"], found[key], "its runs give", EXACT)
        usable = [value for key, value in found.items() if key[0] == method and value is not None]
        best = min(usable, default=None)
        if len(usable) == len(entry["candidates"]):
            _differ(path, f"statistic of {method}", entry["statistic"], best, "its best is", EXACT)
