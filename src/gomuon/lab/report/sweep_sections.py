"""Section of a report on a sweep: the statistic of every candidate, and a race of the picked."""

from __future__ import annotations

import dataclasses

from gomuon.lab import formatting as w
from gomuon.lab.experiments import optimizers
from gomuon.lab.report.document import Block, Cell, Note, Plot, Section, Table
from gomuon.lab.report.language_sections import loss_name
from gomuon.lab.report.sweep_plot import SweepLine, SweepPoint, sweep
from gomuon.lab.report.terminal_sweep import statistic, verdict
from gomuon.lab.results.campaigns import ArmRuns, Campaign
from gomuon.lab.results.candidates import Candidate, Pick
from gomuon.lab.results.statistics import score_name

TITLE = "The sweep"
CLOSE = 0.01  # a rate this near to the best statistic, as a share of it, does about as well


def picked_race(campaign: Campaign, picks: list[Pick]) -> Campaign:
    """The campaign with the picked arms only; with all arms if nothing is picked yet."""
    chosen = [pick.best.arm for pick in picks if pick.best is not None]
    arms = [campaign.arm(name) for name in chosen]
    if not arms:
        return campaign
    return dataclasses.replace(
        campaign,
        arms=tuple(dataclasses.replace(arm, color=_color(picks, arm)) for arm in arms),
        comparisons=tuple((name, chosen[0]) for name in chosen[1:]),
    )


def _color(picks: list[Pick], arm: ArmRuns) -> int:
    """The colour of a method, the same in the plot of the sweep and in the curves."""
    return [pick.method for pick in picks].index(arm.optimizer)


def caution(campaign: Campaign) -> str:
    """A warning: these arms were picked on the seeds on which they are compared."""
    return (
        f"Each at its own best rate, picked on the same {w.seeds(campaign.seeds)}: to compare the "
        "methods, race the selection on other seeds."
    )


def section(campaign: Campaign, picks: list[Pick]) -> Section:
    """The sweep: warnings first, then the plot and the table of all candidates."""
    warnings = [Note(text, "warn") for pick in picks if (text := pick.warning()) is not None]
    if any(not c.finished for pick in picks for c in pick.candidates):
        warnings = [Note("Picked so far; candidates are still missing.", "warn")]
    blocks: list[Block] = [*warnings]
    if any(pick.best for pick in picks):
        blocks += [_plot(campaign, picks), _sensitivity(campaign, picks)]
    return Section(TITLE, (*blocks, _table(campaign, picks)))


def _plot(campaign: Campaign, picks: list[Pick]) -> Plot:
    """The statistic of every candidate against its rate."""
    lines = []
    tried = {c.momentum for pick in picks for c in pick.candidates}
    momenta = sorted(value for value in tried if value is not None)
    for color, pick in enumerate(picks):
        for momentum in dict.fromkeys(c.momentum for c in pick.candidates):
            own = [c for c in pick.candidates if c.momentum == momentum and c.finished]
            name = optimizers.title(pick.method)
            lines.append(
                SweepLine(
                    name if momentum is None else f"{name} β={momentum:g}",
                    color,
                    0 if momentum is None else momenta.index(momentum),
                    tuple(SweepPoint(c.rate, c.score, c.by_seed) for c in own),
                    pick.best.rate if pick.best in own and pick.best is not None else None,
                )
            )
    told = [_picked_words(pick, campaign) for pick in picks]
    grokking = campaign.task == "grokking"
    quantity = "updates to grok" if grokking else loss_name(score_name(campaign.task))
    never = " A run that never groks counts as one update more than it made." if grokking else ""
    bands = " Bands: from the lowest seed to the highest." if len(campaign.seeds) > 1 else ""
    return sweep(
        "The declared statistic of every candidate against its peak matrix rate; lower is better. "
        "Ringed: picked. At the top: a cross diverged, an arrow is above the picture."
        f"{bands}{never}",
        f"Statistic against rate. {'. '.join(told)}.",
        lines,
        quantity,
    )


def _sensitivity(campaign: Campaign, picks: list[Pick]) -> Table:
    """What is lost beside the best rate, for each method at the momentum it takes."""
    grokking = campaign.task == "grokking"
    rows: list[tuple[Cell | str, ...]] = []
    for pick in picks:
        if (best := pick.best) is None or best.score is None:
            rows.append((optimizers.title(pick.method), *[w.ABSENT] * 6))
            continue
        own = sorted(
            (c for c in pick.candidates if c.momentum == best.momentum), key=lambda c: c.rate
        )
        place = own.index(best)
        near = [c for c in own if c.usable and (c.score or 0.0) <= (1 + CLOSE) * best.score]
        rows.append(
            (
                optimizers.title(pick.method),
                f"{best.rate:g}",
                statistic(best, campaign.steps, grokking),
                _spread(best, grokking),
                _beside(own[place - 1] if place else None, best, campaign),
                _beside(own[place + 1] if place + 1 < len(own) else None, best, campaign),
                f"{len(near)} of {len(own)}",
            )
        )
    quantity = "grok step" if grokking else score_name(campaign.task)
    return Table(
        f"How much the rate matters: the {quantity} at the best rate and at its neighbours in the "
        f"grid, and how many of a method's rates come within {100 * CLOSE:.0f} % of its best.",
        (
            *("method", "best rate", quantity, "over seeds", "next lower rate"),
            *("next higher rate", f"within {100 * CLOSE:.0f} %"),
        ),
        tuple(rows),
    )


def _spread(candidate: Candidate, grokking: bool) -> str:
    """The lowest and the highest seed."""
    if len(candidate.by_seed) < 2:
        return w.ABSENT
    low, high = min(candidate.by_seed), max(candidate.by_seed)
    return f"{low:,.0f} to {high:,.0f}" if grokking else f"{low:.5f} to {high:.5f}"


def _beside(candidate: Candidate | None, best: Candidate, campaign: Campaign) -> str:
    """What a neighbour of the best rate loses."""
    if candidate is None:
        return "not tried"
    if not candidate.usable or candidate.score is None or not best.score:
        return statistic(candidate, campaign.steps, campaign.task == "grokking")
    return w.percent(candidate.score / best.score - 1, 1)


def _picked_words(pick: Pick, campaign: Campaign) -> str:
    name, best = optimizers.title(pick.method), pick.best
    if best is None:
        return f"{name}: nothing picked"
    momentum = "" if best.momentum is None else f" with momentum {best.momentum:g}"
    grokking = campaign.task == "grokking"
    reached = statistic(best, campaign.steps, grokking)
    what = ("grok step " if grokking else "loss ") + reached
    return f"{name}: rate {best.rate:g}{momentum} picked, {what}"


def _table(campaign: Campaign, picks: list[Pick]) -> Table:
    grokking = campaign.task == "grokking"
    momenta = any(c.momentum is not None for pick in picks for c in pick.candidates)
    columns = ["rate", *(["momentum"] if momenta else [])]
    columns += ["grok 99 %", "held out at the end"] if grokking else [score_name(campaign.task)]
    several = len(campaign.seeds) > 1
    columns += ["over seeds"] if several else []
    rows: list[tuple[Cell | str, ...]] = []
    for pick in picks:
        rows.append((optimizers.title(pick.method),))
        for one in pick.candidates:
            row: list[Cell | str] = [f"{one.rate:g}"]
            if momenta:
                row.append(w.ABSENT if one.momentum is None else f"{one.momentum:g}")
            row.append(Cell(statistic(one, campaign.steps, grokking), best=one is pick.best))
            if grokking:
                row.append(w.accuracy(one.accuracy))
            if several:
                row.append(_spread(one, grokking))
            rows.append((*row, verdict(pick, one)))
    seeds = f"mean over {w.seeds(campaign.seeds)}" if len(campaign.seeds) > 1 else "one seed"
    return Table(
        f"All candidates, {seeds}. Statistic: {campaign.statistic}.",
        (*columns, "verdict"),
        tuple(rows),
    )
