"""The rates and momenta that `gomuon tune` or `gomuon reproduce` picked, from selection.json."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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
class Selection:
    """A ``selection.json`` read back.

    Attributes:
        experiment: "tune", or the name of the experiment that was reproduced.
        picked: method -> (rate, momentum or None).
        diverged: methods of which every candidate diverged.
    """

    experiment: str
    task: str
    picked: dict[str, tuple[float, float | None]]
    diverged: tuple[str, ...]
    seeds: tuple[int, ...]
    steps: int
    settings: dict[str, Any]

    @property
    def words(self) -> str:
        """Where its rates come from, for the rule of a plan."""
        sweep = f"{w.seeds(self.seeds)}, {w.many(self.steps, 'update')}"
        command = EXPERIMENT if self.experiment == EXPERIMENT else f"reproduce {self.experiment}"
        return f"picked by gomuon {command} on {self.task} ({sweep})"

    def options(self, method: str) -> dict[str, Any]:
        momentum = self.picked[method][1]
        return {} if momentum is None else {"momentum": momentum}

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
    """Read a ``selection.json``.

    Raises:
        LabError: it is another kind of file, or no method in it has a rate.
    """
    content = read_json(path)
    try:
        experiment = content["experiment"]
        if content["format"] != FORMAT or not isinstance(experiment, str):
            raise ValueError(f"its format must be {FORMAT} and its experiment a name")
        settings, methods = content["settings"], content["methods"]
        order = content.get("order", list(methods))
        if set(order) != set(methods):
            raise ValueError(f"its order, {order!r}, does not match its methods")
        picks = {str(name): _picked(name, methods[name]) for name in order}
        found = Selection(
            experiment,
            tasks.check_name(str(content["task"])),
            {name: pick for name, pick in picks.items() if pick is not None},
            tuple(name for name, pick in picks.items() if pick is None),
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
        raise LabError(f"{path} is not a valid selection: {error.args[0]!r} is missing") from error
    except (LabError, *BAD_VALUE_ERRORS) as error:
        raise LabError(f"{path} is not a valid selection: {error}") from error
    for name in picks:
        optimizers.find(name)
    return found


def _picked(name: str, entry: Mapping[str, Any]) -> tuple[float, float | None] | None:
    """Rate and momentum of a method; None if every candidate diverged."""
    rate, momentum = entry["rate"], entry["momentum"]
    if rate is None:
        return None
    if not (isinstance(rate, int | float) and 0 < rate < math.inf):
        raise ValueError(f"the rate of {name} is {rate!r}")
    if momentum is not None and not (isinstance(momentum, int | float) and 0 <= momentum < 1):
        raise ValueError(f"the momentum of {name} is {momentum!r}")
    return float(rate), None if momentum is None else float(momentum)
