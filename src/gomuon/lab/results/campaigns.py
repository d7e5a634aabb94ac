"""Read a campaign from its folder: the plan, its runs, and the check that they belong together.

A run of another plan, a pair with different hashes or a damaged line is refused here with a clear
message, so that all later code can rely on the data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gomuon.lab.errors import LabError
from gomuon.lab.experiments.loss_windows import LossWindow, windows_for
from gomuon.lab.files import read_json
from gomuon.lab.input_checks import BAD_VALUE_ERRORS, is_file, is_folder
from gomuon.lab.results.pairing import require_pair
from gomuon.lab.results.runs import MANIFEST, Run, load_run

PLAN, RUNS, TIMING = "plan.json", "runs", "timing.json"
# Fields of the plan that the manifest of every run must repeat, besides rate and options.
SHARED = ("task", "steps", "label")


@dataclass(frozen=True)
class ArmRuns:
    """An arm of the plan with its existing runs, by seed."""

    name: str
    title: str
    optimizer: str
    lr: float | None
    options: dict[str, Any]
    group: str
    color: int  # arms with the same title in different groups share a colour
    runs: dict[int, Run]

    @property
    def finished(self) -> dict[int, Run]:
        return {seed: run for seed, run in self.runs.items() if run.finished}

    @property
    def label(self) -> str:
        """The title and the peak matrix rate, if the title does not have it."""
        rate = "" if self.rate is None else f"{self.rate:g}"
        return self.title if rate in self.title.split() else f"{self.title}, lr {rate or 'open'}"

    @property
    def rate(self) -> float | None:
        """The peak matrix rate; if the plan's rule selected it, it is read from the runs."""
        if self.lr is not None:
            return self.lr
        return next((run.config.lr for run in self.runs.values()), None)


@dataclass(frozen=True)
class Campaign:
    folder: Path
    title: str
    experiment: str
    task: str
    label: str
    steps: int
    seeds: tuple[int, ...]
    windows: tuple[LossWindow, ...]
    statistic: str
    rule: str
    comparisons: tuple[tuple[str, str], ...]
    paper: dict[str, Any] | None
    arms: tuple[ArmRuns, ...]
    tuning: tuple[Run, ...]  # runs on the tuning seed, one per rate of a grid
    # If the plan asks for it: mean seconds of a step, cycle by cycle, of arms timed in turn.
    timing: dict[str, list[float]] | None
    missing: tuple[str, ...]  # in the plan, but not started
    foreign: tuple[str, ...]  # in the folder, but not in the plan
    target: float | None = None  # the loss to which the updates of every run are counted

    @property
    def groups(self) -> list[str]:
        return list(dict.fromkeys(arm.group for arm in self.arms))

    @property
    def unfinished(self) -> list[Run]:
        runs = [run for arm in self.arms for run in arm.runs.values()]
        return [run for run in (*runs, *self.tuning) if not run.finished]

    @property
    def race(self) -> bool:
        """Whether this is a user's own race, with no published results to compare with."""
        return self.paper is None

    def arm(self, name: str) -> ArmRuns:
        return next(arm for arm in self.arms if arm.name == name)

    def printed(self, name: str) -> dict[str, Any]:
        """A table of published results; empty if there is none."""
        found = (self.paper or {}).get(name)
        return found if isinstance(found, dict) else {}

    def members(self, group: str) -> list[ArmRuns]:
        return [arm for arm in self.arms if arm.group == group]


def read_campaign(folder: str | Path, load: Callable[[Path], Run] = load_run) -> Campaign:
    """Read the campaign or the single run in `folder`; `load` reads the folder of a run.

    Raises:
        LabError: it is neither, a file is damaged, or the runs may not be compared.
    """
    folder = Path(folder)
    if is_file(folder / PLAN):
        return _campaign(folder, read_json(folder / PLAN), load)
    if is_file(folder / MANIFEST):
        return _single(load(folder))
    state = "has no" if is_folder(folder) else "does not exist, so it has no"
    raise LabError(f"{folder} is neither a campaign nor a run: it {state} {PLAN} or {MANIFEST}")


def _campaign(folder: Path, plan: dict[str, Any], load: Callable[[Path], Run]) -> Campaign:
    path = folder / PLAN
    try:
        seeds = tuple(int(seed) for seed in plan["seeds"])
        comparisons = tuple((str(a), str(b)) for a, b in plan["comparisons"])
        colors = _colors(plan["arms"], comparisons)
        arms = tuple(
            ArmRuns(
                name=_folder_name(str(arm["name"])),
                title=str(arm["title"]),
                optimizer=str(arm["optimizer"]),
                lr=None if arm["lr"] is None else float(arm["lr"]),
                options=dict(arm["options"]),
                group=str(arm["group"]),
                color=colors[str(arm["title"])],
                runs={},
            )
            for arm in plan["arms"]
        )
        windows = tuple(_window(str(name)) for name in plan["windows"])
        paper = plan.get("paper")
        settings = {key: plan[key] for key in SHARED}
        words = {key: str(plan[key]) for key in ("title", "experiment", "statistic", "rule")}
        tuning_seed = plan.get("tuning_seed")
        target = None if plan.get("target") is None else float(plan["target"])
    except KeyError as error:
        raise LabError(f"{path}: field {error.args[0]!r} is missing") from error
    except BAD_VALUE_ERRORS as error:
        raise LabError(f"{path}: not a valid plan ({error})") from error
    unknown = {name for pair in comparisons for name in pair} - {arm.name for arm in arms}
    if unknown:
        raise LabError(
            f"{path}: 'comparisons' has {min(unknown)!r}, which is not an arm of the plan"
        )

    missing: list[str] = []
    used: set[str] = set()
    for arm in arms:
        for seed in seeds:
            name = f"{arm.name}-s{seed}"
            used.add(name)
            if not is_file(folder / RUNS / name / MANIFEST):
                missing.append(name)
                continue
            run = load(folder / RUNS / name)
            _require_declared(run, arm, seed, settings)
            arm.runs[seed] = run
    others = sorted(p.name for p in (folder / RUNS).glob("*") if p.is_dir()) if arms else []
    tuning, foreign = [], []
    for name in (name for name in others if name not in used):
        is_tuning = any(name.startswith(f"{arm.name}-lr") for arm in arms)
        if (
            is_tuning
            and name.endswith(f"-s{tuning_seed}")
            and (folder / RUNS / name / MANIFEST).is_file()
        ):
            tuning.append(load(folder / RUNS / name))
        else:
            foreign.append(name)
    campaign = Campaign(
        folder=folder,
        title=words["title"],
        experiment=words["experiment"],
        task=str(settings["task"]),
        label=str(settings["label"]),
        steps=int(settings["steps"]),
        seeds=seeds,
        windows=windows,
        statistic=words["statistic"],
        rule=words["rule"],
        comparisons=comparisons,
        paper=paper if isinstance(paper, dict) else None,
        arms=arms,
        tuning=tuple(tuning),
        timing=_timing(folder / TIMING) if (folder / TIMING).is_file() else None,
        missing=tuple(missing),
        foreign=tuple(foreign),
        target=target,
    )
    _require_pairs(campaign)
    return campaign


def _timing(path: Path) -> dict[str, list[float]]:
    content = read_json(path)
    try:
        names = [str(name) for name in content["arms"]]
        values = [[float(x) for x in of_arm] for of_arm in content["seconds"]]
        seconds = dict(zip(names, values, strict=True))
    except BAD_VALUE_ERRORS as error:
        raise LabError(f"{path}: not a valid timing file ({error!r})") from error
    for name, taken in seconds.items():
        if not taken or not all(0 < x < math.inf for x in taken):
            raise LabError(f"{path}: the seconds of {name} are {taken!r}, not positive times")
    return seconds


def _single(run: Run) -> Campaign:
    """One run as a campaign with one arm and one seed."""
    config = run.config
    title = config.arm or config.optimizer
    arm = ArmRuns(
        name=config.arm or config.optimizer,
        title=title,
        optimizer=config.optimizer,
        lr=config.lr,
        options=config.options,
        group="",
        color=0,
        runs={config.seed: run},
    )
    return Campaign(
        folder=run.folder,
        title=f"{title} on {config.task}, seed {config.seed}",
        experiment="",
        task=config.task,
        label=config.label,
        steps=config.steps,
        seeds=(config.seed,),
        windows=() if config.modulus else windows_for(config.steps),
        statistic="",
        rule="",
        comparisons=(),
        paper=None,
        arms=(arm,),
        tuning=(),
        timing=None,
        missing=(),
        foreign=(),
    )


def _require_declared(run: Run, arm: ArmRuns, seed: int, settings: dict[str, Any]) -> None:
    """Check that a run belongs to its arm; copied or edited folders are refused."""
    expected = {"arm": arm.name, "seed": seed, "optimizer": arm.optimizer, **settings}
    expected["options"] = arm.options
    if arm.lr is not None:
        expected["lr"] = arm.lr
    for field, value in expected.items():
        found = getattr(run.config, field)
        if found != value:
            raise LabError(
                f"{run.folder}: its {field} is {found!r}, but {PLAN} declares {value!r}; "
                "delete this run's folder and run the command again"
            )
    made = run.config.steps if run.result is None else run.result["steps"]
    if run.result is not None and made < run.config.steps and "diverged_at" not in run.result:
        raise LabError(
            f"{run.folder}: its result has {made} of {run.config.steps} updates; "
            "delete this run's folder and run the command again"
        )


def _require_pairs(campaign: Campaign) -> None:
    for group in campaign.groups:
        for seed in campaign.seeds:
            runs = _of_seed(campaign.members(group), seed)
            for run in runs[1:]:
                require_pair(runs[0], run)


def _of_seed(arms: Sequence[ArmRuns], seed: int) -> list[Run]:
    return [arm.runs[seed] for arm in arms if seed in arm.runs]


def _colors(arms: list[dict[str, Any]], comparisons: Sequence[tuple[str, str]]) -> dict[str, int]:
    """A colour per title: candidates first, so that the tested method always has the same."""
    titles = {str(arm["name"]): str(arm["title"]) for arm in arms}
    order = [*(b for _, b in comparisons), *(a for a, _ in comparisons), *titles]
    distinct = dict.fromkeys(titles[name] for name in order if name in titles)
    return {title: index for index, title in enumerate(distinct)}


def _folder_name(name: str) -> str:
    """Check an arm's name: it is part of a path and must not lead out of the folder."""
    if not name or name.startswith(".") or any(c in name for c in "/\\\0"):
        raise ValueError(f"arm name {name!r} is not a folder name")
    return name


def _window(name: str) -> LossWindow:
    first, last = (int(part) for part in name.split("-"))
    if not 1 <= first <= last:
        raise ValueError(f"window {name!r} is empty")
    return first, last
