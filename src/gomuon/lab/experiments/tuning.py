"""The plan of `gomuon tune`: one arm per method and rate, the same number for every method."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from gomuon.lab import formatting as w
from gomuon.lab.errors import LabError
from gomuon.lab.experiments import optimizers, own_code, racing, tasks
from gomuon.lab.experiments.given_options import parse_options
from gomuon.lab.experiments.loss_windows import windows_for
from gomuon.lab.experiments.plan import Arm, Plan, Quick, loss_statistic
from gomuon.lab.experiments.selection import EXPERIMENT
from gomuon.lab.input_checks import require_whole

GRID, RATIO = 5, 2.0
GROKKING = (
    "grok step, the first of five consecutive held-out evaluations of at least 99 %; earlier is "
    "better, ties go to the higher held-out accuracy at the end"
)


def tune_plan(
    task: str,
    names: str,
    *,
    grid: int | None = None,
    ratio: float = RATIO,
    rates: str = "",
    options: str = "",
    momenta: str = "",
    seeds: str = "0",
    steps: int | None = None,
    adamw_lr: float | None = None,
    **shape: int | None,
) -> Plan:
    """The plan of a sweep.

    Args:
        task: a name of ``experiments.tasks``.
        names: optimizers, separated by commas.
        grid: rates per method; by default 5, or as many as ``rates`` gives.
        ratio: each rate divided by the next lower one.
        rates: ``name=rate/rate/…``, separated by commas, instead of a grid around the default.
        options: ``name.keyword=value`` pairs, the same for every rate of a method.
        momenta: tried with every rate of the methods that have a momentum; methods without one get
            the same number of candidates from a finer grid.
        seeds: see ``racing.parse_seeds``.
        steps: updates per run; None for the task's default, as for everything below.
        adamw_lr: peak rate of everything that is not a matrix.
        shape: RunConfig's width, layers, heads, hidden, modulus, length and batch.
    """
    settings, total = racing.task_settings(task, steps, adamw_lr, shape)
    wanted = racing.parse_names(names)
    given, further = parse_grids(rates, wanted), parse_options(options, wanted)
    tried = parse_momenta(momenta)
    movable = [name for name in wanted if optimizers.has_momentum(name)]
    fixed = [name for name in movable if tried and "momentum" in further.get(name, {})]
    if fixed:
        raise LabError(f"--options gives {fixed[0]} a momentum, which --momenta tries; give one")
    if tried and not movable:
        raise LabError(f"--momenta: none of {', '.join(wanted)} has a momentum")
    finer = {name: 1 if name in movable or not tried else len(tried) for name in wanted}
    count = _count(grid, given, finer)
    if not 1 < ratio < math.inf:
        raise LabError(f"--ratio must be a number above 1, not {ratio:g}")
    arms: list[Arm] = []
    for name in wanted:
        times, keywords = finer[name], further.get(name, {})
        of_method = given.get(name) or geometric_grid(
            optimizers.default_rate(name, task), count * times, ratio ** (1 / times)
        )
        for momentum in tried if name in movable and tried else (None,):
            arms += [_arm(name, rate, momentum, keywords) for rate in of_method]
    chosen = racing.parse_seeds(seeds)
    grokking = task == "grokking"
    return Plan(
        experiment=EXPERIMENT,
        title=f"Sweep of rates on {tasks.title(task)}: {', '.join(map(optimizers.title, wanted))}",
        task=task,
        arms=tuple(arms),
        seeds=chosen,
        steps=total,
        windows=() if grokking else windows_for(total),
        statistic=GROKKING if grokking else loss_statistic(task),
        rule=(
            "per method the candidate with the best statistic, averaged over the seeds; "
            + ("a run that never groks counts as one update more than it made, " * grokking)
            + "one that diverged is not picked. Budget: "
            + _budget(wanted, given, count, ratio, tried)
            + f" Every candidate: {w.seeds(chosen)}, {w.many(total, 'update')}."
        ),
        settings=settings,
        own=own_code.sources(task, wanted),
        quick=Quick(steps=total, seeds=1),
    )


def geometric_grid(middle: float, count: int, ratio: float) -> tuple[float, ...]:
    """``count`` rates around ``middle``, which is one of them, rounded to four digits."""
    first = -(count // 2)
    try:
        rates = tuple(float(f"{middle * ratio ** (first + i):.4g}") for i in range(count))
    except OverflowError:  # raised by **; a product becomes infinite instead
        rates = ()
    if len(set(rates)) < count or not all(0 < rate < math.inf for rate in rates):
        raise LabError(
            f"--grid {count} with --ratio {ratio:g} does not give {count} different rates above 0; "
            f"use a ratio such as {RATIO:g}, or fewer rates"
        )
    return rates


def parse_grids(text: str, wanted: list[str]) -> dict[str, tuple[float, ...]]:
    """``go-muon=.02/.04,muon=.01/.02`` as a dict."""
    grids: dict[str, tuple[float, ...]] = {}
    for part in racing.listed("--rates", text):
        name, _, values = (piece.strip() for piece in part.partition("="))
        if name not in wanted:
            raise LabError(f"--rates names {name!r}, which is not among {', '.join(wanted)}")
        if name in grids:
            raise LabError(f"--rates has {name} twice")
        if not values:
            raise LabError(f"--rates {part} has no rates; write for example {name}=.02/.04/.08")
        rates = [racing.parse_rate(value, f"--rates {part}") for value in values.split("/")]
        if len(set(rates)) < len(rates):
            raise LabError(f"--rates {part} has one rate twice")
        grids[name] = tuple(sorted(rates))
    return grids


def parse_momenta(text: str) -> tuple[float, ...]:
    """``.8,.95`` as numbers."""
    found = []
    for part in racing.listed("--momenta", text):
        try:
            value = float(part)
        except ValueError:
            raise LabError(f"--momenta: {part!r} is not a number; write .8,.95") from None
        if not 0 <= value < 1:
            raise LabError(f"--momenta must lie in [0, 1), not {part}")
        found.append(value)
    if len(set(found)) < len(found):
        raise LabError(f"--momenta has one value twice: {text}")
    return tuple(found)


def _count(grid: int | None, given: dict[str, tuple[float, ...]], finer: dict[str, int]) -> int:
    """The number of rates per method, which must be the same for all methods."""
    for name, rates in given.items():
        if len(rates) % finer[name]:
            raise LabError(
                f"--rates {name}: it has no momentum and needs {finer[name]} rates for each rate "
                f"of the others; {len(rates)} is not a multiple of {finer[name]}"
            )
    counts = {name: len(rates) // finer[name] for name, rates in given.items()}
    if grid is not None:
        require_whole("--grid", grid)
        counts = {"--grid": grid, **counts}
    for name, count in counts.items():
        first = next(iter(counts))
        if count != counts[first]:
            raise LabError(
                f"every method gets the same number of rates, but {first} has {counts[first]} "
                f"and {name} has {count}"
            )
    return next(iter(counts.values()), GRID)


def _arm(name: str, rate: float, momentum: float | None, keywords: Mapping[str, Any]) -> Arm:
    slug = own_code.slug(name) + ("" if momentum is None else f"-m{momentum:g}")
    title = racing.arm_title(name, rate, momentum)
    options = {**keywords, **({} if momentum is None else {"momentum": momentum})}
    return Arm(f"{slug}-lr{rate:g}", title, name, rate, options=options)


def _budget(
    wanted: list[str],
    given: dict[str, tuple[float, ...]],
    count: int,
    ratio: float,
    momenta: tuple[float, ...],
) -> str:
    """The budget in words; it is part of the plan and printed before anything runs."""
    text = f"{w.many(count, 'rate')} per method"
    if given:
        text += f", as given for {w.listing(list(given))}"
    if len(given) < len(wanted) and count > 1:
        text += f", each {ratio:g} times the one before, around {'the' if given else 'its'} default"
    text += "."
    if momenta:
        movable = [name for name in wanted if optimizers.has_momentum(name)]
        fixed = [name for name in wanted if name not in movable]
        values = w.listing([f"{value:g}" for value in momenta])
        text += f" Each with momentum {values}: {count * len(momenta)} candidates"
        text += f" for {w.listing(movable)}"
        if fixed:
            have = "has" if len(fixed) == 1 else "have"
            text += f"; {w.listing(fixed)} {have} no momentum and as many rates, closer together"
        text += "."
    return text
