"""A fair comparison: every method at the rate an equal budget found for it, on fresh seeds."""

from __future__ import annotations

import math

from gomuon.lab import formatting as w
from gomuon.lab.experiments import optimizers
from gomuon.lab.experiments.selection import Choice
from tools.evidence.campaign_list import TASKS
from tools.evidence.estimates import all_finite, estimate, excludes_zero, relative_pairs
from tools.evidence.markdown_tables import (
    DIVERGED,
    NOT_RUN,
    code,
    percent_interval,
    plain_interval,
    table,
    text,
    unsigned_percent,
)
from tools.evidence.ranking import RankedMethod, ranking
from tools.evidence.studies import Evidence, Study

CONTROL = "muon"
EDGES = {"lower": "lowest", "upper": "highest", "only": "the only one"}


def section(evidence: Evidence) -> list[str]:
    blocks = [
        "Every method's rate comes from a sweep with the same declared budget on a seed of its "
        "own; then all methods run on fresh seeds, from the same initial parameters, over the same "
        "minibatches. Ranks are by the mean over seeds; in modular addition a run that never groks "
        "counts as one update more than it made, and ties are broken by held-out accuracy at the "
        "end. Embeddings, norms and vectors are trained by AdamW everywhere, at one rate; AdamW "
        "itself takes its rate for the whole model. A rate at the edge of its grid means that a "
        "better one may lie beyond it. The sweep's own figure, of shorter runs on another seed, "
        "stands beside the rate it picked; its order need not be the order here.",
    ]
    for task, title in TASKS.items():
        blocks += [f"### {title[0].upper()}{title[1:]}", *_task(evidence, task)]
    return blocks


def _task(evidence: Evidence, task: str) -> list[str]:
    sweep, race = evidence.get(f"tune-{task}"), evidence.get(f"race-{task}")
    blocks = [_sweep_sentence(sweep, task)]
    if race is None:
        return [*blocks, f"The race ({code(f'race-{task}')}): {NOT_RUN}."]
    methods = ranking(race)
    declared = f"{w.seeds(race.campaign.seeds)}, {w.many(race.campaign.steps, 'update')} each"
    blocks.append(f"The race ({code(race.name)}): {declared}; {text(race.campaign.statistic)}.")
    if sweep is not None and sweep.campaign.steps != race.campaign.steps:
        blocks.append(
            f"A run of the sweep makes {w.many(sweep.campaign.steps, 'update')} and one of the "
            f"race {race.campaign.steps:,}: the best rate for one need not be best for the other."
        )
        if f"muon-rate-{task}" in evidence:
            blocks[-1] += (
                f" The open questions show how much nearer Muon comes at lower rates "
                f"({code(f'muon-rate-{task}')})."
            )
    if race.shortcoming is not None:
        blocks.append(
            f"{race.shortcoming[0].upper()}{race.shortcoming[1:]}, so there is no final rank."
        )
    if not methods:
        return blocks
    return [*blocks, _table(methods, sweep, race), _first_and_second(methods, race)]


def _sweep_sentence(sweep: Study | None, task: str) -> str:
    if sweep is None:
        return f"The sweep ({code(f'tune-{task}')}): {NOT_RUN}."
    rule = text(sweep.campaign.rule)
    state = "" if sweep.shortcoming is None else f" {sweep.shortcoming}."
    return f"The sweep ({code(sweep.name)}): {rule}{state}"


def _table(methods: list[RankedMethod], sweep: Study | None, race: Study) -> str:
    grokking = race.campaign.task == "grokking"
    control = next((method for method in methods if method.arm.optimizer == CONTROL), None)
    heads = ["rank", "method", "rate", "momentum", "edge of its grid", "in the sweep"]
    if grokking:
        heads += ["grok step, mean", "95 % interval", "grokked"]
        heads += ["evaluations after, below 99 %", "held out at the end"]
    else:
        heads += ["mean", "95 % interval"]
    compared = [_against_control(method, control) for method in methods]
    comparable = any(cell != w.ABSENT for cells in compared for cell in cells)
    heads += ["against Muon", "95 % interval"] if comparable else []
    heads += [f"seed {s}" for s in race.campaign.seeds]
    rows = []
    for rank, method in enumerate(methods, start=1):
        row = [str(rank), text(method.name), f"{method.arm.rate:g}"]
        row += [_momentum(method), _edge(sweep, method), _sweep_statistic(sweep, method)]
        row += _mean_cells(method, grokking, race.campaign.steps)
        row += compared[rank - 1] if comparable else []
        row += [_seed_value(value, method, race) for value in method.values]
        rows.append(row)
    return table(heads, rows, left=2)


def _momentum(method: RankedMethod) -> str:
    found = method.arm.options.get("momentum")
    if found is not None:
        return f"{found:g}"
    entry = optimizers.find(method.arm.optimizer)
    default = None if entry is None else entry.recipe.defaults.get("momentum")
    return w.ABSENT if default is None else f"{default:g}"


def _picked(sweep: Study | None, method: RankedMethod) -> Choice | None:
    """What the sweep says of the rate it picked, if the race took it."""
    choices = {} if sweep is None or sweep.selection is None else sweep.selection.choices
    choice = choices.get(method.arm.optimizer)
    return None if choice is None or choice.rate != method.arm.rate else choice


def _edge(sweep: Study | None, method: RankedMethod) -> str:
    """Whether the picked rate is at an end of its grid; "no" when it lies inside."""
    choice = _picked(sweep, method)
    return w.ABSENT if choice is None else EDGES.get(choice.edge or "", "no")


def _sweep_statistic(sweep: Study | None, method: RankedMethod) -> str:
    """The statistic by which it was picked."""
    choice = _picked(sweep, method)
    if sweep is None or choice is None or choice.statistic is None:
        return w.ABSENT
    if method.grokked is None:
        return w.loss(choice.statistic)
    never = choice.statistic > sweep.campaign.steps
    return f"over {sweep.campaign.steps:,}" if never else f"{choice.statistic:,.0f}"


def _mean_cells(method: RankedMethod, grokking: bool, steps: int) -> list[str]:
    seeds = len(method.values)
    if not math.isfinite(method.mean):
        return [DIVERGED, w.ABSENT, *([f"0 of {seeds}", w.ABSENT, w.ABSENT] if grokking else [])]
    found = estimate(method.values)
    if not grokking:
        return [w.loss(found.mean), plain_interval(found.low, found.high)]
    again = f"{method.below[0]} of {method.below[1]}" if method.grokked else w.ABSENT
    ending = [f"{method.grokked} of {seeds}", again, w.accuracy(method.accuracy)]
    if not method.mean_is_exact:
        bound = math.fsum(min(value, steps) for value in method.values) / seeds
        return [f"over {bound:,.0f}", w.ABSENT, *ending]
    return [f"{found.mean:,.0f}", plain_interval(found.low, found.high, 0), *ending]


def _against_control(method: RankedMethod, control: RankedMethod | None) -> list[str]:
    if control is None or method is control or not all_finite([*method.values, *control.values]):
        return [w.ABSENT, w.ABSENT]
    if not (method.mean_is_exact and control.mean_is_exact):
        return [w.ABSENT, w.ABSENT]
    share = relative_pairs(control.values, method.values)
    return [w.percent(share.mean), percent_interval(share.low, share.high)]


def _seed_value(value: float, method: RankedMethod, race: Study) -> str:
    if not math.isfinite(value):
        return DIVERGED
    if method.grokked is None:
        return w.loss(value)
    return "never" if value > race.campaign.steps else f"{value:,.0f}"


def _first_and_second(methods: list[RankedMethod], race: Study) -> str:
    """Which method is first, and whether the seeds tell it from the second."""
    if len(methods) < 2 or race.shortcoming is not None:
        return ""
    first, second = methods[:2]
    if not all_finite([*first.values, *second.values]):
        return f"{text(first.name)} is first; {text(second.name)} diverged on a seed."
    if not (first.mean_is_exact and second.mean_is_exact):
        counts = (f"{text(m.name)} groks in {m.grokked} of {len(m.values)} runs" for m in methods)
        return f"{'; '.join(counts)}."
    share = relative_pairs(second.values, first.values)
    less = "fewer updates" if race.campaign.task == "grokking" else "lower loss"
    apart = "tell apart" if excludes_zero(share) else "cannot tell from a tie"
    return (
        f"{text(first.name)} is first: {unsigned_percent(share.mean)} {less} than "
        f"{text(second.name)} (95 % interval {percent_interval(share.low, share.high)}), which "
        f"{w.many(len(first.values), 'seed')} {apart}."
    )
