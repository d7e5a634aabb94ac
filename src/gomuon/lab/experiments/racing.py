"""The plan of `gomuon race`, and parsers of options that `race` and `tune` share."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gomuon.lab import formatting as w
from gomuon.lab.errors import LabError
from gomuon.lab.experiments import optimizers, own_code, tasks
from gomuon.lab.experiments.given_options import parse_options
from gomuon.lab.experiments.loss_windows import windows_for
from gomuon.lab.experiments.plan import Arm, Plan, Quick, loss_statistic
from gomuon.lab.experiments.run_config import LARGEST_SEED
from gomuon.lab.experiments.selection import Selection
from gomuon.lab.input_checks import require_positive, require_whole

OPTIMIZERS = "go-muon,muon,adamw"
SEEDS = 5  # fewer hardly tell arms apart: with two, the interval is 12.7 standard errors wide
GROKKING = "first of five consecutive held-out evaluations of at least 99 %"


def race_plan(
    task: str,
    names: str,
    *,
    rates: str = "",
    options: str = "",
    seeds: str = "",
    steps: int | None = None,
    adamw_lr: float | None = None,
    selection: Selection | None = None,
    timing: bool = False,
    target: float | None = None,
    **shape: int | None,
) -> Plan:
    """The plan of a race.

    Args:
        task: a name of ``experiments.tasks``.
        names: optimizers, separated by commas; the first is compared with each of the others.
        rates: ``name=rate`` pairs, separated by commas; the rest take the task's defaults.
        options: ``name.keyword=value`` pairs, separated by commas.
        seeds: see ``parse_seeds``; default: five, from 0 or from the first one that the selection
            did not use.
        steps: updates per run; None for the task's default, as for everything below.
        adamw_lr: peak rate of everything that is not a matrix.
        selection: rates and momenta that a sweep picked, and the model it used.
        timing: whether to measure the step times of all arms in turn, at the end.
        target: a loss to which the updates of every run are counted.
        shape: RunConfig's width, layers, heads, hidden, modulus, length and batch.
    """
    settings, total = task_settings(task, steps, adamw_lr, shape, selection)
    wanted = parse_names(names)
    given, further = parse_rates(rates, wanted), parse_options(options, wanted)
    picked = {} if selection is None else selection.picked
    if selection is not None:
        selection.require_rates(name for name in wanted if name not in given)
    arms = {}
    for name in wanted:
        swept, _ = picked.get(name, (None, None))
        # The default is asked for last: a class from outside may have none.
        rate = given.get(name) or swept or optimizers.default_rate(name, task)
        keywords = selection.options(name) if selection is not None and name in picked else {}
        keywords |= further.get(name, {})
        momentum = keywords.get("momentum")
        title = arm_title(name, rate, momentum)
        arms[name] = Arm(own_code.slug(name), title, name, rate, options=keywords)
    rule = "rates as given; nothing is selected"
    first_seed = 0
    if selection is not None:
        first_seed = max(selection.seeds) + 1
        taken = [name for name in wanted if name in picked and name not in given]
        if not taken:
            raise LabError(
                f"the selection has no rate for {names}; it has {', '.join(selection.picked)}"
            )
        rule = f"settings of {w.listing(taken)} {selection.words}; others as given"
        absent = [name for name in selection.diverged if name not in wanted]
        if absent:
            rule += f"; not {w.listing(absent)}, of which every rate diverged there"
    grokking = task == "grokking"
    if target is not None:
        if grokking:
            raise LabError("--target is a loss; grokking has its own target, 99 % held out")
        require_positive("--target", target)
    return Plan(
        experiment="race",
        title=f"Race on {tasks.title(task)}: {', '.join(map(optimizers.title, wanted))}",
        task=task,
        arms=tuple(arms.values()),
        seeds=parse_seeds(seeds or f"{first_seed}-{first_seed + SEEDS - 1}"),
        steps=total,
        windows=() if grokking else windows_for(total),
        statistic=GROKKING if grokking else loss_statistic(task),
        rule=rule,
        comparisons=tuple((arms[other].name, arms[wanted[0]].name) for other in wanted[1:]),
        settings=settings,
        timing=tuple(arm.name for arm in arms.values()) if timing else (),
        own=own_code.sources(task, wanted),
        target=target,
        quick=Quick(steps=total, seeds=1),
        label="quick" if 2 * total < tasks.defaults(task).get("steps", total) else "full",
    )


def task_settings(
    task: str,
    steps: int | None,
    adamw_lr: float | None,
    shape: Mapping[str, int | None],
    selection: Selection | None = None,
) -> tuple[dict[str, Any], int]:
    """RunConfig fields that all arms share, and the number of updates."""
    settings = tasks.defaults(task)
    refused = [name for name, value in shape.items() if value is not None]
    if own_code.is_own(task) and refused:
        raise LabError(f"--{refused[0]} does not apply to the task {task}; set it in its class")
    if selection is not None:
        selection.require_task(task)
        settings.update(selection.settings)
    settings.update({name: value for name, value in shape.items() if value is not None})
    if adamw_lr is not None:
        settings["adamw_lr"] = adamw_lr
    own = settings.pop("steps", None)
    total = own if steps is None else steps
    if total is None:
        raise LabError(
            f"task {task} does not say how many updates a run has; give --steps, or give its class "
            "the attribute steps"
        )
    require_whole("--steps", total)
    return settings, total


def parse_names(text: str) -> list[str]:
    """Optimizers separated by commas; unknown and repeated names are refused."""
    wanted = [name.strip() for name in text.split(",") if name.strip()]
    if not wanted:
        raise LabError(f"--optimizers is empty; give names such as {OPTIMIZERS}")
    if len(set(wanted)) != len(wanted):
        raise LabError(f"--optimizers has a name twice: {text}")
    for name in wanted:
        optimizers.check_name(name)
    slugs = [own_code.slug(name) for name in wanted]
    if len(set(slugs)) != len(slugs):
        twice = next(slug for slug in slugs if slugs.count(slug) > 1)
        raise LabError(
            f"--optimizers has two classes whose runs would be named {twice}; rename one"
        )
    return wanted


def arm_title(name: str, rate: float, momentum: float | None) -> str:
    """Such as "Muon 0.02", or "Muon 0.02 β=0.95" if the momentum was chosen."""
    return f"{optimizers.title(name)} {rate:g}" + ("" if momentum is None else f" β={momentum}")


def parse_rates(text: str, wanted: list[str]) -> dict[str, float]:
    """``go-muon=.08,muon=.16`` as a dict; all names must be optimizers of the race."""
    rates: dict[str, float] = {}
    for part in listed("--lr", text):
        name, _, value = (piece.strip() for piece in part.partition("="))
        if name not in wanted:
            raise LabError(f"--lr names {name!r}, which is not among {', '.join(wanted)}")
        if name in rates:
            raise LabError(f"--lr has {name} twice: {text}; give one rate for each")
        rates[name] = parse_rate(value, f"--lr {part}")
    return rates


def listed(flag: str, text: str) -> list[str]:
    """The entries between commas; none for an empty text, but commas alone are an error."""
    parts = [part for part in (part.strip() for part in text.split(",")) if part]
    if text and not parts:
        raise LabError(f"{flag} {text!r} has no value; give it one, or leave it out")
    return parts


def parse_rate(text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise LabError(f"{where}: {text!r} is not a number; write for example muon=.02") from None
    if not 0 < value < float("inf"):
        raise LabError(f"{where}: a rate must be positive, not {text}")
    return value


def parse_seeds(text: str) -> tuple[int, ...]:
    """Seeds written as ``0,1,2``, ``17402-17404`` or both."""
    seeds: list[int] = []
    for part in (part.strip() for part in text.split(",")):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None:
            raise LabError(f"--seeds {text!r} is not understood; write 0,1,2 or 17402-17404")
        first, last = (_seed(digits) for digits in (match[1], match[2] or match[1]))
        if last < first or last - first >= 1000:
            raise LabError(f"--seeds: {part} is not a range of at most 1000 seeds")
        seeds.extend(range(first, last + 1))
    if len(set(seeds)) != len(seeds):
        raise LabError(f"--seeds has one seed twice: {text}")
    return tuple(seeds)


def _seed(digits: str) -> int:
    # The length is checked first: Python refuses to convert thousands of digits.
    if len(digits) > len(str(LARGEST_SEED)) or int(digits) > LARGEST_SEED:
        raise LabError(f"--seeds: {digits} is too large; seeds are between 0 and {LARGEST_SEED}")
    return int(digits)
