"""``selection.json``: the rates that were tried, what they scored, and which one each method takes.

`gomuon tune` and `gomuon reproduce` write it (see `results.candidates`); `--selection` of
`gomuon race` and `gomuon reproduce` reads it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gomuon.lab import formatting as w
from gomuon.lab.errors import LabError
from gomuon.lab.experiments import optimizers, tasks
from gomuon.lab.experiments.run_config import RunConfig
from gomuon.lab.files import read_json
from gomuon.lab.input_checks import BAD_VALUE_ERRORS

FORMAT = 1
EXPERIMENT = "tune"
FILE = "selection.json"
# What a race takes from the sweep besides rates and momenta, so that both train the same model.
INHERITED = ("width", "layers", "heads", "hidden", "modulus", "length", "batch", "adamw_lr")


@dataclass(frozen=True)
class Candidate:
    """A rate (and momentum) of a method, with its score over all seeds.

    Attributes:
        momentum: None if the sweep uses the method's default.
        score: the declared statistic, lower is better; None if a run diverged.
        accuracy: breaks ties if the task has held-out pairs.
        by_seed: the score of each seed; empty if it was read from a file.
        finished: whether all seeds are finished; others are not picked.
    """

    arm: str
    method: str
    rate: float
    momentum: float | None = None
    score: float | None = None
    accuracy: float | None = None
    finished: bool = True
    by_seed: tuple[float, ...] = ()

    @property
    def usable(self) -> bool:
        return self.finished and self.score is not None


@dataclass(frozen=True)
class Choice:
    """What a ``selection.json`` says of one method.

    Attributes:
        rate: the one it takes; None when every candidate diverged.
        momentum: None for the method's default.
        selected: whether the rate was picked by its statistic; otherwise the plan declared it.
        statistic: what the rate scored; None when it was not tried or diverged.
        edge: which end of its grid the rate lies on: "lower", "upper", "only" one rate, or None.
        candidates: all that were tried; empty in a file written by hand.
        options: further keywords, which all candidates had.
    """

    rate: float | None
    momentum: float | None
    selected: bool = True
    statistic: float | None = None
    edge: str | None = None
    candidates: tuple[Candidate, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


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
        """Where its rates come from, for the rule of a plan."""
        tuned = self.experiment == EXPERIMENT
        command = EXPERIMENT if tuned else f"reproduce {self.experiment}"
        made_on = f"{w.seeds(self.seeds)}, {w.many(self.steps, 'update')}"
        return f"picked by gomuon {command} on {self.task} ({made_on})"

    def options(self, method: str) -> dict[str, Any]:
        momentum, options = self.picked[method][1], dict(self.choices[method].options)
        return options if momentum is None else {**options, "momentum": momentum}

    def require_rates(self, methods: Iterable[str]) -> None:
        wanted = set(methods)
        lost = [name for name in self.diverged if name in wanted]
        if lost:
            raise LabError(
                f"every rate that the selection's sweep tried for {w.listing(lost)} diverged; "
                f"tune again with lower ones (gomuon tune --optimizers {','.join(lost)}), "
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
        LabError: it is another kind of file, or no method in it has a rate.
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
            raise ValueError(f"its order, {order!r}, does not match its methods")
        found = Selection(
            content["experiment"],
            tasks.check_name(str(content["task"])),
            {str(name): _choice(name, methods[name]) for name in order},
            tuple(int(seed) for seed in content["seeds"]),
            int(content["steps"]),
            {name: settings[name] for name in INHERITED if name in settings},
        )
        # Checked here, so that the error names the file.
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
    except (LabError, *BAD_VALUE_ERRORS) as error:
        raise LabError(f"{path} is not a selection of gomuon tune or reproduce: {error}") from error
    for name in found.choices:
        optimizers.check_name(name)
    return found


def _choice(name: str, entry: Mapping[str, Any]) -> Choice:
    return Choice(
        _number(f"rate of {name}", entry["rate"], lambda rate: 0 < rate < math.inf),
        _number(f"momentum of {name}", entry["momentum"], lambda momentum: 0 <= momentum < 1),
        bool(entry.get("selected", True)),
        _number(f"statistic of {name}", entry.get("statistic"), math.isfinite),
        _edge(name, entry.get("edge")),
        tuple(_candidate(name, one) for one in entry.get("candidates", ())),
        {str(key): value for key, value in entry.get("options", {}).items()},
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
