"""Turn what a user typed after ``race`` into a plan: any optimizers, any rates, any size."""

from __future__ import annotations

import re
from typing import Any

from gomuon.lab import optimizers, tasks
from gomuon.lab.errors import LabError
from gomuon.lab.experiments import TRAJECTORY
from gomuon.lab.plans import Arm, Plan, Quick
from gomuon.lab.statistics import windows_for

TITLES = {"go-muon": "Go-MUON", "muon": "Muon", "adamw": "AdamW"}
GROKKING = "first of five consecutive held-out evaluations of at least 99 %"


def race_plan(
    task: str,
    names: str,
    *,
    rates: str = "",
    seeds: str = "0",
    steps: int | None = None,
    adamw_lr: float | None = None,
    threads: int = 1,
    **shape: int | None,
) -> Plan:
    """The plan of a race.

    Args:
        task: a name of ``lab.tasks``.
        names: optimizers, separated by commas; the first is compared with each of the others.
        rates: ``name=rate`` pairs, separated by commas; the rest take the task's defaults.
        seeds: see ``parse_seeds``.
        steps: updates per run; None for the task's default, as for everything below.
        adamw_lr: peak rate of everything that is not a matrix.
        threads: torch's threads per run.
        shape: RunConfig's width, layers, heads, hidden, modulus, length and batch.
    """
    settings = {**tasks.DEFAULTS[tasks.check_name(task)]}
    settings.update({name: value for name, value in shape.items() if value is not None})
    if adamw_lr is not None:
        settings["adamw_lr"] = adamw_lr
    total = settings.pop("steps") if steps is None else steps
    settings.pop("steps", None)
    if total < 1:
        raise LabError(f"--steps must be at least 1, not {total}")
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if not wanted:
        raise LabError("--optimizers is empty; give names such as go-muon,muon,adamw")
    if len(set(wanted)) != len(wanted):
        raise LabError(f"--optimizers names one twice: {names}")
    given = parse_rates(rates, wanted)
    arms = []
    for name in wanted:
        rate = given[name] if name in given else optimizers.default_rate(name, task)
        arms.append(Arm(name, f"{TITLES.get(name, name)} {rate:g}", name, rate))
    grokking = task == "grokking"
    return Plan(
        experiment="race",
        title=f"Race on {task}: {', '.join(TITLES.get(name, name) for name in wanted)}",
        task=task,
        arms=tuple(arms),
        seeds=parse_seeds(seeds),
        steps=total,
        windows=() if grokking else windows_for(total),
        statistic=GROKKING if grokking else TRAJECTORY,
        rule="rates as given; nothing is selected",
        comparisons=tuple((other, wanted[0]) for other in wanted[1:]),
        settings=settings,
        quick=Quick(steps=total, seeds=1),
        threads=threads,
    )


def parse_rates(text: str, wanted: list[str]) -> dict[str, float]:
    """``go-muon=.08,muon=.16`` as a mapping; only optimizers of the race may be named."""
    rates: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = (piece.strip() for piece in part.partition("="))
        if name not in wanted:
            raise LabError(f"--lr names {name!r}, which is not among {', '.join(wanted)}")
        rates[name] = _number(value, f"--lr {part}")
    return rates


def _number(text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise LabError(f"{where}: {text!r} is not a number; write for example muon=.02") from None
    if not 0 < value < float("inf"):
        raise LabError(f"{where}: a rate must be positive, not {text}")
    return value


def parse_seeds(text: str) -> tuple[int, ...]:
    """``0,1,2`` or ``17402-17404`` or a mixture."""
    seeds: list[int] = []
    for part in (part.strip() for part in text.split(",")):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None:
            raise LabError(f"--seeds {text!r} is not understood; write 0,1,2 or 17402-17404")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last - first >= 1000:
            raise LabError(f"--seeds: {part} is not a range of at most 1000 seeds")
        seeds.extend(range(first, last + 1))
    if len(set(seeds)) != len(seeds):
        raise LabError(f"--seeds names one twice: {text}")
    return tuple(seeds)


def shape_flags(values: dict[str, Any]) -> dict[str, int | None]:
    """The model flags among a command's arguments."""
    names = ("width", "layers", "heads", "hidden", "modulus", "length", "batch")
    return {name: values[name] for name in names}
