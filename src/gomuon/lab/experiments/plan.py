"""A plan: what a campaign will run, written down before anything runs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from gomuon.lab.errors import LabError
from gomuon.lab.experiments.loss_windows import LossWindow, window_name, windows_for
from gomuon.lab.experiments.published import PublishedResults
from gomuon.lab.experiments.run_config import RunConfig, is_held_out
from gomuon.lab.input_checks import require_whole

FORMAT = 1
# What several plans declare.
TRAJECTORY = "geometric mean of the three window means of pre-update training loss; lower is better"
HELD_OUT = "loss on held-out data after the last update; lower is better"
PAIRED = "every seed pairs the arms by hash; the interval is Student's t at 95 % over the pairs"


def loss_statistic(task: str) -> str:
    """The statistic by which runs of a language task are judged."""
    return HELD_OUT if is_held_out(task) else TRAJECTORY


@dataclass(frozen=True)
class Arm:
    """One optimizer with its settings, run on every seed of the plan.

    Attributes:
        name: used in folder names: ``<name>-s<seed>``.
        title: used in tables and plots.
        optimizer: a name of ``experiments.optimizers``.
        lr: peak rate of matrices; None if the plan's rule selects it from ``grid``.
        grid: rates tried on the tuning seed, as runs ``<name>-lr<rate>-s<tuning seed>``.
        options: further keywords of the optimizer.
        settings: RunConfig fields that differ from the plan's, such as the modulus.
        group: arms of one group have equal hashes and may be compared.
    """

    name: str
    title: str
    optimizer: str
    lr: float | None
    grid: tuple[float, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    group: str = ""


@dataclass(frozen=True)
class Quick:
    """The short version of a plan, of a few minutes; its results are labelled "quick"."""

    steps: int
    seeds: int
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """A declared experiment.

    Attributes:
        comparisons: pairs (control, candidate) of arm names.
        settings: RunConfig fields shared by all arms.
        own: name -> source of the task and the optimizers that come from outside; see
            ``own_code.sources``.
        timing: the arms whose step times are measured in turn, at the end.
        paper: the published results; None for a user's own race.
        target: a loss; the report says how many updates each run needs to reach it.
    """

    experiment: str
    title: str
    task: str
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    steps: int
    statistic: str
    rule: str
    quick: Quick
    windows: tuple[LossWindow, ...] = ()
    comparisons: tuple[tuple[str, str], ...] = ()
    tuning_seed: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    timing: tuple[str, ...] = ()
    own: dict[str, dict[str, Any]] = field(default_factory=dict)
    paper: PublishedResults | None = None
    label: str = "full"
    threads: int = 1
    target: float | None = None

    def declaration(self) -> dict[str, Any]:
        """The content of ``plan.json``; a campaign is continued only with the same content."""
        return {
            "format": FORMAT,
            "experiment": self.experiment,
            "title": self.title,
            "task": self.task,
            "label": self.label,
            "arms": [_listed(dataclasses.asdict(arm)) for arm in self.arms],
            "seeds": list(self.seeds),
            "tuning_seed": self.tuning_seed,
            "steps": self.steps,
            "windows": [window_name(window) for window in self.windows],
            "statistic": self.statistic,
            "rule": self.rule,
            "comparisons": [list(pair) for pair in self.comparisons],
            "settings": self.settings,
            "timing": list(self.timing) or None,
            "threads": self.threads,
            "target": self.target,
            "paper": None if self.paper is None else _listed(dataclasses.asdict(self.paper)),
            **({"own": self.own} if self.own else {}),
        }

    def config(self, arm: Arm, seed: int, lr: float, name: str | None = None) -> RunConfig:
        """The configuration of one run."""
        return RunConfig(
            task=self.task,
            optimizer=arm.optimizer,
            lr=lr,
            seed=seed,
            steps=self.steps,
            arm=name or arm.name,
            options=dict(arm.options),
            threads=self.threads,
            label=self.label,
            **{**self.settings, **arm.settings},
        )

    def tuning_configs(self) -> list[RunConfig]:
        """The runs on the tuning seed, which select the rates."""
        if self.tuning_seed is None:
            return []
        return [
            self.config(arm, self.tuning_seed, rate, tuning_name(arm, rate))
            for arm in self.arms
            for rate in arm.grid
        ]

    def main_configs(self, rates: dict[str, float]) -> list[RunConfig]:
        """The runs that are compared, seed by seed, so that pairs finish at about the same time."""
        return [
            self.config(arm, seed, rates[arm.name] if arm.lr is None else arm.lr)
            for seed in self.seeds
            for arm in self.arms
        ]


def tuning_name(arm: Arm, rate: float) -> str:
    return f"{arm.name}-lr{rate:g}"


def run_name(config: RunConfig) -> str:
    """The folder of a run inside its campaign's ``runs``."""
    return f"{config.arm}-s{config.seed}"


def adapt(
    plan: Plan,
    *,
    quick: bool = False,
    seeds: tuple[int, ...] | None = None,
    steps: int | None = None,
    threads: int = 1,
) -> Plan:
    """The plan with the user's seeds, steps and threads; labelled "quick" if it has fewer steps."""
    declared = plan.steps
    chosen_steps = steps if steps is not None else (plan.quick.steps if quick else plan.steps)
    require_whole("--steps", chosen_steps)
    chosen_seeds = seeds or (plan.seeds[: plan.quick.seeds] if quick else plan.seeds)
    if len(set(chosen_seeds)) != len(chosen_seeds) or min(chosen_seeds) < 0:
        raise LabError(f"--seeds must be different and not negative, not {list(chosen_seeds)}")
    settings = {**plan.settings, **(plan.quick.settings if quick else {})}
    return dataclasses.replace(
        plan,
        steps=chosen_steps,
        seeds=chosen_seeds,
        windows=windows_for(chosen_steps) if plan.windows else (),
        settings=settings,
        label="quick" if quick or chosen_steps < declared else plan.label,
        threads=threads,
    )


def _listed(value: Any) -> Any:
    """Tuples as lists, as JSON returns them."""
    if isinstance(value, dict):
        return {key: _listed(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_listed(item) for item in value]
    return value
