"""The fair comparison: every method at the rate an equal budget found for it, on fresh seeds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from gomuon.lab import formatting as w
from gomuon.lab.evidence import numbers as n
from gomuon.lab.evidence.reading import (
    Evidence,
    Study,
    below_again,
    grokked_at,
    held_out_at_end,
    score,
)
from gomuon.lab.evidence.slots import TASKS
from gomuon.lab.evidence.tables import code, table, text
from gomuon.lab.experiments import optimizers
from gomuon.lab.results.campaigns import ArmRuns

CONTROL = "muon"
EDGES = {"lower": "lowest", "upper": "highest", "only": "the only one"}


@dataclass(frozen=True)
class Place:
    """A method's outcome in a race; the mean decides the rank, lower is better.

    Attributes:
        values: one per seed: geometric mean of the windows, or grok step; a run that never groks
            counts as one update more than it made, one that diverged as infinite.
        grokked: in how many runs it grokked; None for the corpora.
        accuracy: held-out accuracy at the end, by which ties are broken.
        below: evaluations below 99 % after a run had grokked, and all evaluations after that.
    """

    arm: ArmRuns
    values: tuple[float, ...]
    grokked: int | None = None
    accuracy: float = 0.0
    below: tuple[int, int] = (0, 0)

    @property
    def mean(self) -> float:
        return math.fsum(self.values) / len(self.values)

    @property
    def certain(self) -> bool:
        """Whether its mean is one, rather than a bound: a run that never groks is over so many."""
        return self.grokked in (None, len(self.values))

    @property
    def name(self) -> str:
        return optimizers.title(self.arm.optimizer)


def standings(study: Study) -> list[Place]:
    """The arms that have finished on every seed, best first."""
    whole = [arm for arm in study.campaign.arms if len(arm.finished) == len(study.campaign.seeds)]
    return sorted((_place(study, arm) for arm in whole), key=lambda p: (p.mean, -p.accuracy))


def _place(study: Study, arm: ArmRuns) -> Place:
    runs = list(arm.finished.values())
    values = tuple(math.inf if value is None else value for value in map(score, runs))
    if study.campaign.task != "grokking":
        return Place(arm, values)
    grokked = sum(grokked_at(run) is not None for run in runs)
    finals = [held_out_at_end(run) or 0.0 for run in runs]
    again = [below_again(run) for run in runs]
    below = sum(len(failures) for failures, _ in again), sum(later for _, later in again)
    return Place(arm, values, grokked, math.fsum(finals) / len(finals), below)


def section(evidence: Evidence) -> list[str]:
    blocks = [
        "Every method's rate comes from a sweep with the same declared budget on its own seed; "
        "then all run on fresh seeds, from the same initial parameters, over the same minibatches. "
        "Ranks are by the mean over seeds, "
        "in modular addition with one update more than were made where a run never groks, then by "
        "held-out accuracy at the end. Embeddings, norms and vectors are AdamW's in all of "
        "them, at one rate; AdamW itself takes its rate for the whole model. A rate at the edge of "
        "its grid means that a better one may lie beyond it. The sweep's own figure, of shorter "
        "runs on another seed, stands beside the rate it picked: the order there is not the order "
        "here.",
    ]
    for task, title in TASKS.items():
        blocks += [f"### {title[0].upper()}{title[1:]}", *_task(evidence, task)]
    return blocks


def _task(evidence: Evidence, task: str) -> list[str]:
    sweep, race = evidence.get(f"tune-{task}"), evidence.get(f"race-{task}")
    blocks = [_budget(sweep, task)]
    if race is None:
        return [*blocks, f"The race ({code(f'race-{task}')}): {n.NOT_RUN}."]
    places = standings(race)
    declared = f"{w.seeds(race.campaign.seeds)}, {w.many(race.campaign.steps, 'update')} each"
    blocks.append(f"The race ({code(race.name)}): {declared}; {text(race.campaign.statistic)}.")
    if sweep is not None and sweep.campaign.steps != race.campaign.steps:
        blocks.append(
            f"A run of the sweep makes {w.many(sweep.campaign.steps, 'update')} and one of the "
            f"race {race.campaign.steps:,}: what is best for the one need not be for the other."
        )
        if f"muon-rate-{task}" in evidence:
            blocks[-1] += (
                f" How much nearer Muon comes at lower rates, {code(f'muon-rate-{task}')} tells, "
                "among the open questions."
            )
    if race.shortcoming is not None:
        blocks.append(
            f"{race.shortcoming[0].upper()}{race.shortcoming[1:]}, so there is no final rank."
        )
    if not places:
        return blocks
    return [*blocks, _table(places, sweep, race), _sentence(places, race)]


def _budget(sweep: Study | None, task: str) -> str:
    if sweep is None:
        return f"The sweep ({code(f'tune-{task}')}): {n.NOT_RUN}."
    rule = text(sweep.campaign.rule)
    state = "" if sweep.shortcoming is None else f" {sweep.shortcoming}."
    return f"The sweep ({code(sweep.name)}): {rule}{state}"


def _table(places: list[Place], sweep: Study | None, race: Study) -> str:
    grokking = race.campaign.task == "grokking"
    control = next((place for place in places if place.arm.optimizer == CONTROL), None)
    heads = ["rank", "method", "rate", "momentum", "edge of its grid", "in the sweep"]
    if grokking:
        heads += ["grok step, mean", "95 % interval", "grokked"]
        heads += ["evaluations after, below 99 %", "held out at the end"]
    else:
        heads += ["mean", "95 % interval"]
    compared = [_against(place, control) for place in places]
    comparable = any(cell != w.ABSENT for cells in compared for cell in cells)
    heads += ["against Muon", "95 % interval"] if comparable else []
    heads += [f"seed {s}" for s in race.campaign.seeds]
    rows = []
    for rank, place in enumerate(places, start=1):
        row = [str(rank), text(place.name), f"{place.arm.rate:g}"]
        row += [_momentum(place), _edge(sweep, place), _swept(sweep, place)]
        row += _mean(place, grokking, race.campaign.steps)
        row += compared[rank - 1] if comparable else []
        row += [_value(value, place, race) for value in place.values]
        rows.append(row)
    return table(heads, rows, left=2)


def _momentum(place: Place) -> str:
    found = place.arm.options.get("momentum")
    if found is not None:
        return f"{found:g}"
    entry = optimizers.find(place.arm.optimizer)
    default = None if entry is None else entry.recipe.defaults.get("momentum")
    return w.ABSENT if default is None else f"{default:g}"


def _picked(sweep: Study | None, place: Place) -> dict[str, Any] | None:
    """What the sweep says of the rate it picked, if the race took it."""
    methods = {} if sweep is None or sweep.selection is None else sweep.selection["methods"]
    entry: dict[str, Any] | None = methods.get(place.arm.optimizer)
    return None if entry is None or entry["rate"] != place.arm.rate else entry


def _edge(sweep: Study | None, place: Place) -> str:
    """Whether the picked rate is at an end of its grid; "no" when it lies inside."""
    entry = _picked(sweep, place)
    return w.ABSENT if entry is None else EDGES.get(entry["edge"] or "", "no")


def _swept(sweep: Study | None, place: Place) -> str:
    """The statistic by which it was picked."""
    entry = _picked(sweep, place)
    if sweep is None or entry is None or entry["statistic"] is None:
        return w.ABSENT
    if place.grokked is None:
        return w.loss(entry["statistic"])
    never = entry["statistic"] > sweep.campaign.steps
    return f"over {sweep.campaign.steps:,}" if never else f"{entry['statistic']:,.0f}"


def _mean(place: Place, grokking: bool, steps: int) -> list[str]:
    seeds = len(place.values)
    if not math.isfinite(place.mean):
        return [n.DIVERGED, w.ABSENT, *([f"0 of {seeds}", w.ABSENT, w.ABSENT] if grokking else [])]
    found = n.estimate(place.values)
    if not grokking:
        return [w.loss(found.mean), n.plain_interval(found.low, found.high)]
    again = f"{place.below[0]} of {place.below[1]}" if place.grokked else w.ABSENT
    ending = [f"{place.grokked} of {seeds}", again, w.accuracy(place.accuracy)]
    if not place.certain:
        bound = math.fsum(min(value, steps) for value in place.values) / seeds
        return [f"over {bound:,.0f}", w.ABSENT, *ending]
    return [f"{found.mean:,.0f}", n.plain_interval(found.low, found.high, 0), *ending]


def _against(place: Place, control: Place | None) -> list[str]:
    if control is None or place is control or not n.known([*place.values, *control.values]):
        return [w.ABSENT, w.ABSENT]
    if not (place.certain and control.certain):
        return [w.ABSENT, w.ABSENT]
    share = n.relative_pairs(control.values, place.values)
    return [w.percent(share.mean), n.percent_interval(share.low, share.high)]


def _value(value: float, place: Place, race: Study) -> str:
    if not math.isfinite(value):
        return n.DIVERGED
    if place.grokked is None:
        return w.loss(value)
    return "never" if value > race.campaign.steps else f"{value:,.0f}"


def _sentence(places: list[Place], race: Study) -> str:
    """Who is first, and whether the seeds tell it from the second."""
    if len(places) < 2 or race.shortcoming is not None:
        return ""
    first, second = places[:2]
    if not n.known([*first.values, *second.values]):
        return f"{text(first.name)} is first; {text(second.name)} diverged on a seed."
    if not (first.certain and second.certain):
        counts = [f"{text(p.name)} groks in {p.grokked} of {len(p.values)} runs" for p in places]
        return f"{'; '.join(counts)}."
    share = n.relative_pairs(second.values, first.values)
    less = "fewer updates" if race.campaign.task == "grokking" else "lower loss"
    apart = "tell apart" if n.told_apart(share) else "cannot tell from a tie"
    return (
        f"{text(first.name)} is first: {n.amount(share.mean)} {less} than {text(second.name)} "
        f"(95 % interval {n.percent_interval(share.low, share.high)}), which "
        f"{w.many(len(first.values), 'seed')} {apart}."
    )
