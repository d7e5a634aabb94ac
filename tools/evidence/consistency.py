"""Check a collected campaign against its plan, its curves and its selection.

Every refusal names the file and both values, so that the page may trust what passes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from gomuon.lab.errors import LabError
from gomuon.lab.experiments.loss_windows import window_name, windows_for
from gomuon.lab.results.campaigns import PLAN
from gomuon.lab.results.runs import MANIFEST, RESULT, Run
from gomuon.lab.results.statistics import (
    GROK_THRESHOLD,
    first_reaching,
    geometric_mean,
    grok_step,
    retention_failures,
)
from tools.evidence.studies import Study, score
from tools.evidence.thinned_curve import CURVE, Curve

WINDOW_TOLERANCE = 1e-5  # a mean of values rounded to five decimals
EXACT = 1e-9


def check_settings(study: Study) -> None:
    """Every run has the settings that its plan declares for its arm, the tuning runs as well."""
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
    require_equal = functools.partial(_require_equal, run.folder / RESULT)
    steps = result.get("steps")
    if "diverged_at" not in result:
        require_equal("steps", steps, run.config.steps, f"{MANIFEST} says")
    if curve is not None:
        require_equal("steps", steps, curve.updates, f"{CURVE} has")
    if run.config.task == "grokking":
        _check_grokking(result, curve, require_equal)
    else:
        _check_language(run, result, curve, require_equal)


RequireEqual = Callable[..., None]


def _check_language(
    run: Run, result: Mapping[str, Any], curve: Curve | None, require_equal: RequireEqual
) -> None:
    found = result.get("windows")
    if not isinstance(found, dict):
        raise LabError(f"{run.folder / RESULT}: 'windows' is missing; collect the campaign again")
    windows = windows_for(run.config.steps)
    names = [window_name(window) for window in windows]
    require_equal("windows", sorted(found), sorted(names), "the windows of its length are")
    means = [found[name] for name in names]
    if None not in means:
        mean = geometric_mean([float(value) for value in means])
        recorded = result.get("geometric_mean")
        require_equal("geometric_mean", recorded, mean, "its windows give", EXACT)
    for window in windows if curve is not None else ():
        mean_of_curve = None if curve is None else curve.mean(*window)
        if mean_of_curve is not None:
            name = window_name(window)
            require_equal(
                f"window {name}", found[name], mean_of_curve, f"{CURVE} gives", WINDOW_TOLERANCE
            )


def _check_grokking(
    result: Mapping[str, Any], curve: Curve | None, require_equal: RequireEqual
) -> None:
    grokked, fitted = result.get("grok_step"), result.get("train_99_step")
    delay = None if grokked is None or fitted is None else grokked - fitted
    require_equal("delay", result.get("delay"), delay, "its grok and train steps give")
    if curve is None:
        return
    points = curve.test_points
    require_equal("grok_step", grokked, grok_step(points), f"{CURVE} gives")
    failures, recorded = retention_failures(points, grokked), result.get("retention_failures")
    require_equal("retention_failures", recorded, failures, f"{CURVE} gives")
    # The curve holds every tenth training accuracy only, so the run may have fitted earlier.
    seen = first_reaching(curve.train_points)
    if seen is not None and (fitted is None or fitted > seen):
        require_equal("train_99_step", fitted, seen, f"{CURVE} reaches {GROK_THRESHOLD:.0%} at")


def _require_equal(
    path: Path, name: str, found: Any, expected: Any, source: str, tolerance: float = 0.0
) -> None:
    """Raise a LabError that names the file and both values, unless they agree."""
    if isinstance(found, int | float) and isinstance(expected, int | float):
        if abs(found - expected) <= tolerance:
            return
    elif found == expected:
        return
    raise LabError(
        f"{path}: {name} is {found!r}, but {source} {expected!r}; collect the campaign again"
    )


def check_selection(study: Study, path: Path) -> None:
    """What a selection says it scored is what its runs say, and what it picked is their best.

    The screen of modular addition, which sums over moduli, is computed anew by its claim.
    """
    if study.selection is None or study.plan["experiment"] == "grokking":
        return
    scores = _candidate_scores(study)
    for method, choice in study.selection.choices.items():
        for candidate in choice.candidates:
            key = (method, candidate.rate, candidate.momentum)
            if key in scores:
                name = f"statistic of {method} at {candidate.rate:g}"
                _require_equal(path, name, candidate.score, scores[key], "its runs give", EXACT)
        usable = [value for key, value in scores.items() if key[0] == method and value is not None]
        if choice.selected and len(usable) == len(choice.candidates):
            best = min(usable, default=None)
            _require_equal(
                path, f"statistic of {method}", choice.statistic, best, "its best is", EXACT
            )


CandidateKey = tuple[str, float, float | None]  # method, rate, momentum


def _candidate_scores(study: Study) -> dict[CandidateKey, float | None]:
    """The mean statistic of every candidate that has run on all its seeds; None if one diverged."""
    if study.campaign.tuning:
        return {
            (run.config.optimizer, run.config.lr, run.config.options.get("momentum")): score(run)
            for run in study.campaign.tuning
        }
    return {
        (arm.optimizer, float(arm.rate or 0), arm.options.get("momentum")): _mean_score(
            arm.finished.values()
        )
        for arm in study.campaign.arms
        if len(arm.finished) == len(study.campaign.seeds)
    }


def _mean_score(runs: Iterable[Run]) -> float | None:
    scores = [score(run) for run in runs]
    known = [value for value in scores if value is not None]
    return math.fsum(known) / len(known) if len(known) == len(scores) else None
