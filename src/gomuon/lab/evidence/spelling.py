"""The command a campaign was made with, read off its plan."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from gomuon.lab.errors import LabError
from gomuon.lab.experiments import catalogue, optimizers, tasks
from gomuon.lab.experiments.plan import Plan
from gomuon.lab.experiments.tuning import GRID, RATIO, geometric_grid

SHAPE = ("width", "layers", "heads", "hidden", "modulus", "length", "batch")


def command(plan: Mapping[str, Any], selection: Mapping[str, Any] | None = None) -> str:
    """The line to type, from the root of a clone, to run this plan again.

    Args:
        plan: the content of plan.json.
        selection: the content of the sweep's selection.json that the plan took its rates from.
    """
    kinds = {"race": _race, "tune": _tune}
    words = kinds.get(plan["experiment"], _reproduce)(plan, selection)
    return shlex.join(["gomuon", *words, "--threads", str(plan["threads"])])


def uses_selection(plan: Mapping[str, Any]) -> bool:
    return "picked by gomuon tune" in plan["rule"]


def sweep_of(plan: Mapping[str, Any]) -> str:
    """The results folder of the sweep on the plan's task."""
    return f"tune-{plan['task']}"


def _reproduce(plan: Mapping[str, Any], selection: Mapping[str, Any] | None) -> list[str]:
    words = ["reproduce", plan["experiment"]]
    declared = _declared(plan["experiment"])
    seeds, steps = tuple(plan["seeds"]), plan["steps"]
    quick = declared is not None and plan["label"] == "quick" and steps == declared.quick.steps
    if quick and declared is not None:
        words.append("--quick")
        usual: tuple[tuple[int, ...], int] = declared.seeds[: declared.quick.seeds], steps
    else:
        usual = ((), 0) if declared is None else (declared.seeds, declared.steps)
    words += [] if seeds == usual[0] else ["--seeds", _seeds(seeds)]
    words += [] if steps == usual[1] else ["--steps", str(steps)]
    return [*words, *_selected(plan)]


def _declared(name: str) -> Plan | None:
    try:
        return catalogue.find(name)
    except LabError:
        return None


def _race(plan: Mapping[str, Any], selection: Mapping[str, Any] | None) -> list[str]:
    task, arms = plan["task"], plan["arms"]
    picked = {} if selection is None else selection["methods"]
    given = []
    for arm in arms:
        name, usual = arm["optimizer"], optimizers.default_rate(arm["optimizer"], task)
        if uses_selection(plan):
            usual = picked.get(name, {}).get("rate", arm["lr"] if selection is None else usual)
        if arm["lr"] != usual:
            given.append(f"{name}={arm['lr']:g}")
    words = ["race", "--task", task, "--optimizers", ",".join(arm["optimizer"] for arm in arms)]
    words += ["--lr", ",".join(given)] if given else []
    words += [*_selected(plan), "--seeds", _seeds(plan["seeds"]), *_settings(plan)]
    return [*words, "--timing"] if plan.get("timing") else words


def _tune(plan: Mapping[str, Any], selection: Mapping[str, Any] | None) -> list[str]:
    task = plan["task"]
    grids: dict[str, list[float]] = {}
    momenta: dict[str, list[float]] = {}
    for arm in plan["arms"]:
        rates, tried = (kind.setdefault(arm["optimizer"], []) for kind in (grids, momenta))
        rates += [] if arm["lr"] in rates else [arm["lr"]]
        momentum = arm["options"].get("momentum")
        tried += [] if momentum is None or momentum in tried else [momentum]
    shared = max(momenta.values(), key=len)
    # Without a momentum to try, a method gets as many candidates from a finer grid.
    finer = {
        name: len(shared) if shared and not momenta[name] and len(rates) > 1 else 1
        for name, rates in grids.items()
    }
    counts = {name: len(rates) // finer[name] for name, rates in grids.items()}
    count = min(counts.values())
    match = re.search(r"each ([\d.e+-]+) times the one before", plan["rule"])
    ratio = RATIO if match is None else float(match[1])
    given = []
    for name, rates in grids.items():
        times = finer[name]
        usual = geometric_grid(
            optimizers.default_rate(name, task), count * times, ratio ** (1 / times)
        )
        if tuple(rates) != usual:
            given.append(f"{name}={'/'.join(f'{rate:g}' for rate in rates)}")
    words = ["tune", "--task", task, "--optimizers", ",".join(grids)]
    words += [] if count == GRID else ["--grid", str(count)]
    words += [] if ratio == RATIO else ["--ratio", f"{ratio:g}"]
    words += ["--rates", ",".join(given)] if given else []
    words += ["--momenta", ",".join(f"{value:g}" for value in shared)] if shared else []
    return [*words, "--seeds", _seeds(plan["seeds"]), *_settings(plan)]


def _selected(plan: Mapping[str, Any]) -> list[str]:
    if not uses_selection(plan):
        return []
    return ["--selection", f"results/{sweep_of(plan)}/selection.json"]


def _settings(plan: Mapping[str, Any]) -> list[str]:
    """Flags for whatever is not the task's own."""
    usual = tasks.DEFAULTS.get(plan["task"], {})
    words = [] if plan["steps"] == usual.get("steps") else ["--steps", str(plan["steps"])]
    for name in ("adamw_lr", *SHAPE):
        value = plan["settings"].get(name)
        if value is not None and value != usual.get(name):
            words += [f"--{name.replace('_', '-')}", f"{value:g}"]
    return words


def _seeds(seeds: Sequence[int]) -> str:
    """0,1,5 or, for a stretch of them, 17402-17404."""
    stretch = list(range(seeds[0], seeds[0] + len(seeds)))
    if len(seeds) > 2 and list(seeds) == stretch:
        return f"{seeds[0]}-{seeds[-1]}"
    return ",".join(str(seed) for seed in seeds)
