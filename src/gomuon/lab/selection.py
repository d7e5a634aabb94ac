"""``selection.json``: the rates that were tried, what they scored, and which one each method takes.

`gomuon tune` and `gomuon reproduce` write it; `--selection` of `gomuon race` and `gomuon reproduce`
takes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gomuon.lab import optimizers, tasks
from gomuon.lab import wording as w
from gomuon.lab.errors import LabError
from gomuon.lab.foreign import UNFIT
from gomuon.lab.plans import Plan, tuning_name
from gomuon.lab.runs import Run, RunConfig
from gomuon.lab.statistics import grokking_result, language_result, window_name, windows_for
from gomuon.lab.storage import read_json, write_json

FORMAT = 1
EXPERIMENT = "tune"
FILE = "selection.json"
# What a race takes over from the sweep beside rates and momenta, so that both train one model.
INHERITED = ("width", "layers", "heads", "hidden", "modulus", "length", "batch", "adamw_lr")


@dataclass(frozen=True)
class Candidate:
    """A rate (and momentum) of a method, with its outcome over all seeds.

    Attributes:
        momentum: None when the sweep leaves it at the method's default.
        score: the declared statistic, lower is better; None when a run diverged.
        accuracy: how ties are broken where the task has held-out pairs.
        finished: whether every seed is there; nothing else is picked.
    """

    arm: str
    method: str
    rate: float
    momentum: float | None = None
    score: float | None = None
    accuracy: float | None = None
    finished: bool = True

    @property
    def usable(self) -> bool:
        return self.finished and self.score is not None


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
        """None when no candidate stayed finite."""
        usable = [candidate for candidate in self.candidates if candidate.usable]
        return min(usable, key=lambda c: (c.score, -(c.accuracy or 0.0)), default=None)

    @property
    def edge(self) -> str | None:
        """Which end of the grid the rate lies on: "lower", "upper", "only" one rate, or None."""
        if self.taken is None:
            return None
        rates = {candidate.rate for candidate in self.candidates}
        if len(rates) == 1:
            return "only"
        ends = {min(rates): "lower", max(rates): "upper"}
        return ends.get(self.taken.rate)

    def warning(self) -> str | None:
        """What must be said loudly: nothing was picked, or the optimum may lie outside."""
        if self.declared is not None:
            return None
        name = optimizers.title(self.method)
        if self.best is None:
            return f"{name}: nothing picked, every rate diverged; sweep lower rates"
        rate = f"{self.best.rate:g}"
        if self.edge == "only":
            return f"{name}: {rate} was the only rate tried, so nothing says it is the best"
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


def candidate(
    arm: str, config: RunConfig, momentum: float | None, runs: Sequence[Run], seeds: int
) -> Candidate:
    """Score an arm by what its runs recorded."""
    known = [run for run in runs if run.result is not None]
    if len(known) < seeds:
        return Candidate(arm, config.optimizer, config.lr, momentum, finished=False)
    if config.task == "grokking":
        results = [grokking_result(run.metrics) for run in known]
        # A run that never groks counts as one update more than it made.
        steps = [r["grok_step"] or config.steps + 1 for r in results]
        scores: list[float | None] = [float(step) for step in steps]
        accuracy: float | None = _mean([r["final_test_accuracy"] or 0.0 for r in results])
    else:
        windows = windows_for(config.steps)
        scores = [language_result(run.metrics, windows)["geometric_mean"] for run in known]
        accuracy = None
    finite = [score for score in scores if score is not None and math.isfinite(score)]
    diverged = any("diverged_at" in (run.result or {}) for run in known)
    score = None if diverged or len(finite) < len(scores) else _mean(finite)
    return Candidate(arm, config.optimizer, config.lr, momentum, score, accuracy)


def picks_of(plan: Plan, runs: Sequence[Run]) -> list[Pick]:
    """Per method of a sweep, in the plan's order, its scored candidates."""
    found: dict[str, list[Candidate]] = {}
    for arm in plan.arms:
        if arm.lr is None:
            raise ValueError(f"arm {arm.name!r} of a sweep has no rate")
        own = [run for run in runs if run.config.arm == arm.name]
        config = plan.config(arm, plan.seeds[0], arm.lr)
        found.setdefault(arm.optimizer, []).append(
            candidate(arm.name, config, arm.options.get("momentum"), own, len(plan.seeds))
        )
    return [Pick(method, tuple(candidates)) for method, candidates in found.items()]


def tuned_picks(plan: Plan, runs: Sequence[Run]) -> list[Pick]:
    """Per arm of an experiment that has a grid, its candidates on the tuning seed."""
    if plan.tuning_seed is None:
        return []
    picks = []
    for arm in plan.arms:
        candidates = []
        for rate in arm.grid:
            config = plan.config(arm, plan.tuning_seed, rate, tuning_name(arm, rate))
            own = [run for run in runs if run.config.arm == config.arm]
            momentum = arm.options.get("momentum")
            candidates.append(candidate(config.arm, config, momentum, own, 1))
        if candidates:
            picks.append(Pick(arm.optimizer, tuple(candidates), declared=arm.lr))
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
    """Write ``selection.json``: what was tried, what it scored, what each method takes."""
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
            "order": list(methods),  # as asked for; the file is sorted by name
            "methods": methods,
        },
    )
    return path


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


@dataclass(frozen=True)
class Choice:
    """What a ``selection.json`` says of one method.

    Attributes:
        rate: the one it takes; None when every candidate diverged.
        momentum: None for the method's default.
        selected: whether the rate was picked by its statistic; otherwise the plan declared it.
        statistic: what the rate scored; None when it was not tried or diverged.
        edge: as `Pick.edge`.
        candidates: all that were tried; empty in a file written by hand.
    """

    rate: float | None
    momentum: float | None
    selected: bool = True
    statistic: float | None = None
    edge: str | None = None
    candidates: tuple[Candidate, ...] = ()


@dataclass(frozen=True)
class Selection:
    """A ``selection.json`` read back; `choices` by method, in the order they were asked for."""

    experiment: str
    task: str
    choices: dict[str, Choice]
    seeds: tuple[int, ...]
    steps: int
    settings: dict[str, Any]

    @property
    def picked(self) -> dict[str, tuple[float, float | None]]:
        """Method -> (rate, momentum or None), of every method that has a rate."""
        return {
            name: (choice.rate, choice.momentum)
            for name, choice in self.choices.items()
            if choice.rate is not None
        }

    @property
    def diverged(self) -> tuple[str, ...]:
        """Methods of which every candidate diverged."""
        return tuple(name for name, choice in self.choices.items() if choice.rate is None)

    @property
    def words(self) -> str:
        """Where its rates come from, for the rule of a plan that uses them."""
        tuned = self.experiment == EXPERIMENT
        command = EXPERIMENT if tuned else f"reproduce {self.experiment}"
        made_on = f"{w.seeds(self.seeds)}, {w.many(self.steps, 'update')}"
        return f"picked by gomuon {command} on {self.task} ({made_on})"

    def options(self, method: str) -> dict[str, Any]:
        momentum = self.picked[method][1]
        return {} if momentum is None else {"momentum": momentum}

    def require_rates(self, methods: Iterable[str]) -> None:
        wanted = set(methods)
        lost = [name for name in self.diverged if name in wanted]
        if lost:
            raise LabError(
                f"every rate that the selection's sweep tried for {w.listing(lost)} diverged; "
                f"tune again over lower ones (gomuon tune --optimizers {','.join(lost)}), "
                "give a rate yourself, or leave it out"
            )

    def require_task(self, task: str) -> None:
        if task != self.task:
            raise LabError(
                f"the selection was tuned on {self.task!r}, not on {task!r}; "
                f"run gomuon tune --task {task}, or give rates yourself"
            )


def read_selection(path: Path) -> Selection:
    """Read what ``gomuon tune`` or ``gomuon reproduce`` wrote.

    Raises:
        LabError: it is no such file, or no method in it has a rate.
    """
    content = read_json(path)
    try:
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']!r}, expected {FORMAT}")
        if not isinstance(content["experiment"], str):
            raise ValueError(f"its experiment is {content['experiment']!r}, expected a name")
        settings, methods = content["settings"], content["methods"]
        order = content.get("order", list(methods))
        if set(order) != set(methods):
            raise ValueError(f"its order, {order!r}, is not of its methods")
        found = Selection(
            content["experiment"],
            tasks.check_name(str(content["task"])),
            {str(name): _choice(name, methods[name]) for name in order},
            tuple(int(seed) for seed in content["seeds"]),
            int(content["steps"]),
            {name: settings[name] for name in INHERITED if name in settings},
        )
        # Refused here, with the file's name, and not when the first run is configured.
        RunConfig(found.task, optimizers.ADAMW, 1.0, max(found.seeds, default=0), found.steps,
                  **found.settings)  # fmt: skip
        if not (found.picked and found.seeds):
            lost = list(found.diverged)
            why = f", because every rate of {w.listing(lost)} diverged" if lost else ""
            raise ValueError(f"it picks nothing{why}")
    except KeyError as error:
        raise LabError(
            f"{path} is not a selection of gomuon tune or reproduce: {error.args[0]!r} is missing"
        ) from error
    except (LabError, *UNFIT) as error:
        raise LabError(f"{path} is not a selection of gomuon tune or reproduce: {error}") from error
    for name in found.choices:
        optimizers.find(name)
    return found


def _choice(name: str, entry: Mapping[str, Any]) -> Choice:
    return Choice(
        _number(f"rate of {name}", entry["rate"], lambda rate: 0 < rate < math.inf),
        _number(f"momentum of {name}", entry["momentum"], lambda momentum: 0 <= momentum < 1),
        bool(entry.get("selected", True)),
        _number(f"statistic of {name}", entry.get("statistic"), math.isfinite),
        _edge(name, entry.get("edge")),
        tuple(_candidate(name, one) for one in entry.get("candidates", ())),
    )


def _candidate(method: str, entry: Mapping[str, Any]) -> Candidate:
    """A candidate as `_entry` wrote it; the name of its arm is not kept."""
    return Candidate(
        "",
        method,
        float(entry["rate"]),
        _number(f"momentum of {method}", entry["momentum"], math.isfinite),
        _number(f"statistic of {method}", entry["statistic"], math.isfinite),
        _number(f"accuracy of {method}", entry.get("final_test_accuracy"), math.isfinite),
    )


def _edge(name: str, value: Any) -> str | None:
    if value is not None and value not in ("lower", "upper", "only"):
        raise ValueError(f"the edge of {name} is {value!r}")
    return value


def _number(name: str, value: Any, fits: Callable[[float], bool]) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not fits(value):
        raise ValueError(f"the {name} is {value!r}")
    return float(value)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
