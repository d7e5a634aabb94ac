"""Plans about cost: what may be computed cheaply, and who reaches a loss first in seconds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gomuon.lab.experiments import optimizers
from gomuon.lab.experiments.loss_windows import windows_for
from gomuon.lab.experiments.plan import PAIRED, TRAJECTORY, Arm, Plan, Quick
from gomuon.recipes.registry import METHODS

# What may be computed cheaply. Chance alone moves one task's mean over five seeds by more than
# .5 %, so the tasks are judged together. What is free may become a default.
FREE = (
    "an arm is free if, over the pairs of all tasks together, its mean is at most .2 % above "
    "{}'s and its interval ends below +.5 %"
)
FAST_UPDATES = 400
SAMPLED: dict[str, Any] = {"polar": "fast", "rows": 256}  # of 2,048 rows
AVERAGED: dict[str, Any] = {**SAMPLED, "input_decay": 0.97}
FAST_ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "exact": ("exact, K = 4", {"polar": "exact"}),
    "fast-4": ("fast polar, K = 4", {"polar": "fast", "refresh_every": 4}),
    "fast-8": ("fast polar, K = 8", {"polar": "fast", "refresh_every": 8}),
    "fast-16": ("fast polar, K = 16", {"polar": "fast", "refresh_every": 16}),
    # A change as small as rounding: what chance alone does to a trajectory.
    "twin": ("exact, momentum + 1e-7", {"polar": "exact", "momentum": 0.8 + 1e-7}),
    "rows-4": ("256 rows, K = 4", SAMPLED),
    # Sides of 384 in three blocks, as a longer side would be by default.
    "blocks-4": ("blocks of 128, K = 4", {"polar": "fast", "block_size": 128}),
    "average-4": ("256 rows, A averaged, K = 4", AVERAGED),
    "average-8": ("256 rows, A averaged, K = 8", {**AVERAGED, "refresh_every": 8}),
    "blocks-8": (
        "256 rows, A averaged, blocks of 128, K = 8",
        {**AVERAGED, "refresh_every": 8, "block_size": 128},
    ),
    "average-16": ("256 rows, A averaged, K = 16", {**AVERAGED, "refresh_every": 16}),
    "products": ("roots by products, K = 4", {"polar": "fast", "roots": "products"}),
    "capped": ("condition at most 100, K = 4", {"polar": "fast", "max_condition": 100.0}),
}


def against_first(
    experiment: str,
    title: str,
    task: str,
    arms: Mapping[str, tuple[str, dict[str, Any]]],
    seeds: tuple[int, ...],
) -> Plan:
    """Go-MUON in its first arm, against arms that make it cheaper."""
    control, *cheaper = arms
    return Plan(
        experiment=experiment,
        title=title,
        task=task,
        arms=tuple(
            Arm(name, label, "go-muon", 0.08, options=options)
            for name, (label, options) in arms.items()
        ),
        seeds=seeds,
        steps=FAST_UPDATES,
        windows=windows_for(FAST_UPDATES),
        statistic=TRAJECTORY,
        rule=f"all arms at rate .08, fixed in advance; {FREE.format(control)}; {PAIRED}",
        comparisons=tuple((control, name) for name in cheaper),
        quick=Quick(steps=60, seeds=1),
    )


FAST_TASKS = {
    "ptb": "Penn Treebank",
    "shakespeare": "Tiny Shakespeare",
    "gpt": "A GPT with LayerNorm",
}


def on_tasks(
    name: str,
    title: str,
    arms: Mapping[str, tuple[str, dict[str, Any]]],
    seeds: tuple[int, ...],
    tasks: Mapping[str, str] = FAST_TASKS,
) -> tuple[Plan, ...]:
    """The same arms on every task."""
    return tuple(
        against_first(f"{name}-{task}", f"{corpus}: {title}", task, arms, seeds)
        for task, corpus in tasks.items()
    )


FAST = on_tasks(
    "fast", "exact Go-MUON against cheaper ones", FAST_ARMS, seeds=(301, 302, 303, 304, 305)
)

# What the campaigns above suggest, tried on fresh seeds: as many rows as a side asks for, and the
# preset as it was then, with larger blocks than the arm "blocks-8" above.
PRESET_ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "exact": FAST_ARMS["exact"],
    "rows-auto": ('rows="auto", K = 4', {"polar": "fast", "rows": "auto"}),
    "preset": (
        'rows="auto", A averaged, blocks of 256, K = 8',
        {**AVERAGED, "rows": "auto", "refresh_every": 8, "block_size": 256},
    ),
}
PRESETS = on_tasks(
    "preset",
    "exact Go-MUON against the fast preset",
    PRESET_ARMS,
    seeds=(601, 602, 603, 604, 605),
)

# What blocks cost: factors of sides of 128 and 384 whole, and in blocks of half and of a quarter of
# the width, as a side of 512 or 1024 has them with the default of 256.
BLOCK_ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "whole": ("whole factors, K = 4", {"polar": "fast", "block_size": None}),
    "half": ("blocks of 64, K = 4", {"polar": "fast", "block_size": 64}),
    "quarter": ("blocks of 32, K = 4", {"polar": "fast", "block_size": 32}),
}
BLOCK_TASKS = {task: FAST_TASKS[task] for task in ("ptb", "shakespeare")}
BLOCKS = on_tasks(
    "blocks",
    "Go-MUON with whole factors against factors in blocks",
    BLOCK_ARMS,
    seeds=(701, 702, 703, 704, 705),
    tasks=BLOCK_TASKS,
)

# Who reaches tuned Muon's loss first, in seconds. Every method is in its cheapest form, at the rate
# that its sweep picked and at half of it, because the best rate falls with the length of a run;
# Muon's two are those that suit races. The rival is the one that was quickest in the races. Mousse
# needed as many updates there, and every step of it costs more.
SPEED_RATES = {"muon": (0.02, 0.01), "go-muon": (0.08, 0.04), "matched-kfac": (0.01, 0.005)}
SPEED_CORPORA = {"ptb": "Penn Treebank", "shakespeare": "Tiny Shakespeare"}


def speed(task: str, corpus: str) -> Plan:
    """Go-MUON's fast preset against rivals with fast polar factors."""
    cheapest = {"go-muon": dict(METHODS["GoMuon"].recipe.presets["fast"])}
    arms = tuple(
        Arm(
            f"{name}-{rate:g}",
            f"{optimizers.title(name)} {rate:g}",
            name,
            rate,
            options=cheapest.get(name, {"polar": "fast"}),
        )
        for name, rates in SPEED_RATES.items()
        for rate in rates
    )
    return Plan(
        experiment=f"speed-{task}",
        title=f"{corpus}: seconds to tuned Muon's loss",
        task=task,
        arms=arms,
        seeds=(401, 402, 403, 404, 405),
        steps=FAST_UPDATES,
        windows=windows_for(FAST_UPDATES),
        statistic=(
            "updates until the mean loss of 50 updates is at most the final one of Muon on the "
            "same seed, times the whole step; Muon at the rate with the lower mean final loss"
        ),
        rule="each method at the rate of its two that arrives first on average; means over seeds",
        comparisons=tuple(
            (f"{name}-{rates[0]:g}", "go-muon-0.08")
            for name, rates in SPEED_RATES.items()
            if name != "go-muon"
        ),
        timing=tuple(arm.name for arm in arms),
        quick=Quick(steps=60, seeds=1),
    )


SPEED = tuple(speed(task, corpus) for task, corpus in SPEED_CORPORA.items())
