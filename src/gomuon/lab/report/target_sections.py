"""Section of a report on the time to a target, with runs that never reach it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gomuon.lab import formatting as w
from gomuon.lab.report.document import Block, Section, Table
from gomuon.lab.report.target_plot import Reaching, reaching
from gomuon.lab.results.survival import (
    Summary,
    Time,
    TimesCompared,
    compare_times,
    kaplan_meier,
    summarise,
)


@dataclass(frozen=True)
class TimedArm:
    """The times of an arm, by seed."""

    name: str
    color: int
    times: Mapping[int, Time]


def section(
    title: str,
    target: str,
    horizon: int,
    groups: Mapping[str, tuple[Sequence[TimedArm], Sequence[tuple[TimedArm, TimedArm]]]],
) -> Section:
    """Curves, a table of arms and a table of pairs, for each group; empty with a single seed.

    Args:
        title: of the section.
        target: what is reached, as in "99 % held out".
        horizon: the updates that every run makes.
        groups: arms, and pairs of (control, candidate), by the group's name.
    """
    blocks: list[Block] = []
    for name, (arms, pairs) in groups.items():
        shown = [arm for arm in arms if arm.times]
        if max((len(arm.times) for arm in shown), default=0) > 1:
            known = [(a, b) for a, b in pairs if set(a.times) & set(b.times)]
            blocks += _group(name, target, horizon, shown, known)
    return Section(title, tuple(blocks))


def _group(
    name: str,
    target: str,
    horizon: int,
    arms: Sequence[TimedArm],
    pairs: Sequence[tuple[TimedArm, TimedArm]],
) -> list[Block]:
    at = f" ({name})" if name else ""
    summaries = [summarise(list(arm.times.values()), horizon) for arm in arms]
    told = [
        f"{arm.name} {found.reached} of {found.runs}"
        for arm, found in zip(arms, summaries, strict=True)
    ]
    curves = []
    for arm in arms:
        curve = kaplan_meier(list(arm.times.values()))
        curves.append(Reaching(arm.name, arm.color, curve.times, curve.short))
    plot = reaching(
        f"The share of seeds that have reached {target}{at} by each update (Kaplan and Meier's "
        "estimate). A curve that ends below 100 % has seeds that did not reach it.",
        f"Seeds that reach {target} within {horizon:,} updates{at}: {w.listing(told)}.",
        curves,
        horizon,
    )
    blocks: list[Block] = [plot, _arms(target, horizon, at, arms, summaries)]
    if pairs:
        found = compare_times([(a.times, b.times) for a, b in pairs], horizon)
        blocks.append(_pairs(target, at, pairs, found))
    return blocks


def _arms(
    target: str, horizon: int, at: str, arms: Sequence[TimedArm], summaries: Sequence[Summary]
) -> Table:
    rows = [
        (
            arm.name,
            f"{found.reached} of {found.runs}",
            f"over {horizon:,}" if found.median is None else w.step(found.median),
            w.step(found.mean),
            # Without a single success nothing is known of how much longer the runs would need.
            w.ABSENT
            if not found.reached or found.runs == 1
            else f"{w.step(found.low)} to {w.step(found.high)}",
        )
        for arm, found in zip(arms, summaries, strict=True)
    ]
    return Table(
        f"Updates to {target}{at}. A run that does not reach it is censored at {horizon:,} "
        "updates: it is neither left out nor taken for a success. The restricted mean counts "
        f"every run up to {horizon:,} updates.",
        ("arm", "seeds that reach it", "median", "restricted mean", "95 % interval"),
        tuple(rows),
    )


def _pairs(
    target: str,
    at: str,
    pairs: Sequence[tuple[TimedArm, TimedArm]],
    found: Sequence[TimesCompared],
) -> Table:
    many = len(found) > 1
    rows = []
    head, names = w.pairs([(control.name, candidate.name) for control, candidate in pairs])
    for name, one in zip(names, found, strict=True):
        alone, whole = one.comparison.paired, one.comparison
        ties = f", {one.ties} tied" if one.ties else ""
        rows.append(
            (
                name,
                w.signed(alone.mean, 0),
                w.interval(alone.low, alone.high, 0),
                *((w.interval(whole.low, whole.high, 0),) if many else ()),
                w.p_value(whole.adjusted),
                f"{one.first} of {len(alone.differences)}{ties}",
                w.ABSENT if math.isnan(whole.p) else w.p_value(one.sign_p),
            )
        )
    columns = [head, "mean difference", "95 % interval"]
    columns += [f"for all {len(found)} pairs"] if many else []
    columns += ["p", "first on", "sign test"]
    text = (
        f"Differences of the updates to {target}{at}, seed by seed, no run counted for more than "
        "it ran; negative is faster. p: paired t test"
    )
    if many:
        text += ", adjusted for the number of pairs by Holm's method"
    text += (
        ". The sign test only asks who is first; it is the log-rank test with seeds as strata, "
        "made exact, and cannot fall below .05 with fewer than six seeds."
    )
    return Table(text, tuple(columns), tuple(rows))
