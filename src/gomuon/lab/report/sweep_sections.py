"""Section of a report on a sweep: the statistic of every candidate, and a race of the picked."""

from __future__ import annotations

import dataclasses

from gomuon.lab import formatting as w
from gomuon.lab.experiments import optimizers
from gomuon.lab.report.document import Block, Cell, Note, Section, Table
from gomuon.lab.report.sweep_plot import SweepLine, sweep
from gomuon.lab.report.terminal_sweep import statistic, verdict
from gomuon.lab.results.campaigns import ArmRuns, Campaign
from gomuon.lab.results.candidates import Pick
from gomuon.lab.results.statistics import score_name


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
    plot = [_plot(campaign, picks)] if any(pick.best for pick in picks) else []
    blocks: list[Block] = [*warnings, *plot, _table(campaign, picks)]
    return Section("The sweep", tuple(blocks))


def _plot(campaign: Campaign, picks: list[Pick]) -> Block:
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
                    tuple((c.rate, c.score) for c in own),
                    pick.best.rate if pick.best in own and pick.best is not None else None,
                )
            )
    told = [_picked_words(pick, campaign) for pick in picks]
    grokking = campaign.task == "grokking"
    quantity = "updates to grok" if grokking else f"loss, {score_name(campaign.task)}"
    never = " A run that never groks counts as one update more than it made." if grokking else ""
    return sweep(
        "The declared statistic of every candidate against its peak matrix rate; lower is better. "
        f"Ringed: picked. Crosses at the top: diverged.{never}",
        f"Statistic against rate. {'. '.join(told)}.",
        lines,
        quantity,
    )


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
            rows.append((*row, verdict(pick, one)))
    seeds = f"mean over {w.seeds(campaign.seeds)}" if len(campaign.seeds) > 1 else "one seed"
    return Table(
        f"All candidates, {seeds}. Statistic: {campaign.statistic}.",
        (*columns, "verdict"),
        tuple(rows),
    )
