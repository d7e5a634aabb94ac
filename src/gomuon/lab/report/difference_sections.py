"""Paired differences of character models, as tables and a plot."""

from __future__ import annotations

import math

from gomuon.lab import formatting as w
from gomuon.lab.report import plots
from gomuon.lab.report.document import Block, Section, Table
from gomuon.lab.results.campaigns import ArmRuns
from gomuon.lab.results.comparisons import Comparison
from gomuon.lab.results.language_outcomes import LanguageOutcomes, Measure, PairedSeeds

FEW = 3  # pairs of which every measure is drawn


def sections(report: LanguageOutcomes) -> list[Section]:
    """A picture and the pairs together; each pair's table, folded away if there are many."""
    tables: list[Block] = []
    drawn: list[plots.DifferenceRow] = []
    pairs = report.comparisons()
    family = {(c.name, d.name): found for c, d, found in report.compare_all()}
    # With many pairs the picture has room for the measure that decides.
    shown = report.measures if len(pairs) <= FEW else (report.deciding,)
    for index, (control, candidate) in enumerate(pairs):
        rows = []
        for measure in report.measures:
            result = report.paired(control, candidate, measure)
            if result is None:
                continue
            # The paper has one comparison per experiment: the first one of the plan.
            theirs = _paper_difference(report, measure) if index == 0 else (w.ABSENT, w.ABSENT)
            rows.append((measure.title, *_figures(result), *theirs, *_by_seed(report, result)))
            if measure in shown:
                together = family.get((control.name, candidate.name))
                outer = together if measure is report.deciding and len(family) > 1 else None
                row = _difference_row(measure, control, candidate, result, outer, len(pairs))
                drawn += [row] if row is not None else []
        if rows:
            tables.append(_difference_table(report, control, candidate, rows))
    if not drawn:
        return [Section("Paired differences", tuple(tables))]
    told = [
        f"{' '.join(filter(None, (row.name, row.legend)))} {w.signed(row.mean, 2)} %"
        for row in drawn
    ]
    caption = (
        "Relative paired differences; left of zero the loss is lower. Dots are seeds, a diamond is "
        "their mean and a bar its 95 % interval."
    )
    if len(family) > 1:
        caption += f" A thin line is the interval that holds for all {len(family)} pairs together."
    plot = plots.paired_differences(
        caption,
        f"Mean differences in per cent of the control: {w.listing(told)}.",
        drawn,
    )
    first: list[Block] = [plot, _family_table(report)] if len(family) > 1 else [plot]
    if len(pairs) <= FEW:
        return [Section("Paired differences", (*first, *tables))]
    return [
        Section("Paired differences", tuple(first)),
        Section("Each pair, seed by seed", tuple(tables), folded=True),
    ]


def _difference_table(
    report: LanguageOutcomes, control: ArmRuns, candidate: ArmRuns, rows: list[tuple[str, ...]]
) -> Table:
    columns = ["measure", "mean", "95 % interval", "relative", "wins", "paper", "paper's wins"]
    columns += [f"seed {seed}" for seed in report.campaign.seeds]
    keep = [i for i, column in enumerate(columns) if report.campaign.paper or "paper" not in column]
    return Table(
        f"{candidate.title} minus {control.title} on the same seed; negative means lower loss. "
        "The interval is Student's t over the pairs and needs at least two.",
        tuple(columns[i] for i in keep),
        tuple(tuple(row[i] for i in keep) for row in rows),
    )


def _family_table(report: LanguageOutcomes) -> Table:
    """All pairs by the deciding measure, with what corrects for their number."""
    rows = []
    found = report.compare_all()
    head, names = w.pairs([(control.title, candidate.title) for control, candidate, _ in found])
    for name, (_, _, one) in zip(names, found, strict=True):
        scale = one.paired.relative / one.paired.mean if one.paired.mean else 0.0
        rows.append(
            (
                name,
                w.percent(one.paired.relative),
                w.percents(scale * one.paired.low, scale * one.paired.high),
                w.percents(scale * one.low, scale * one.high),
                w.p_value(one.p),
                w.p_value(one.adjusted),
                f"{one.paired.wins}/{len(one.paired.differences)}",
            )
        )
    return Table(
        f"All pairs by the {report.deciding.title}, in per cent of the control's. An interval of "
        f"its own misses one time in twenty; with 95 % confidence none of those for all "
        f"{len(found)} pairs misses (Bonferroni). p: paired t test, and adjusted for the number of "
        "pairs by Holm's method.",
        (
            *(head, "mean", "95 % interval", f"for all {len(found)} pairs"),
            *("p", "p, adjusted", "wins"),
        ),
        tuple(rows),
    )


def _difference_row(
    measure: Measure,
    control: ArmRuns,
    candidate: ArmRuns,
    result: PairedSeeds,
    together: Comparison | None,
    pairs: int,
) -> plots.DifferenceRow | None:
    scale = 100 * result.relative / result.mean if result.mean else 0.0
    if not math.isfinite(scale):
        return None
    against = f"against {control.title}"
    outer = (math.nan, math.nan)
    if together is not None:
        outer = scale * together.low, scale * together.high
    return plots.DifferenceRow(
        measure.title if pairs <= FEW else against,
        control.color if pairs > 1 else candidate.color,
        tuple(scale * d for d in result.differences.values()),
        100 * result.relative,
        scale * result.low,
        scale * result.high,
        against if 1 < pairs <= FEW else "",
        *outer,
    )


def _figures(result: PairedSeeds) -> tuple[str, ...]:
    return (
        w.signed(result.mean),
        w.interval(result.low, result.high),
        w.percent(result.relative),
        f"{result.wins}/{len(result.differences)}",
    )


def _by_seed(report: LanguageOutcomes, result: PairedSeeds) -> list[str]:
    found = [result.differences.get(seed) for seed in report.campaign.seeds]
    return [w.ABSENT if difference is None else w.signed(difference) for difference in found]


def _paper_difference(report: LanguageOutcomes, measure: Measure) -> tuple[str, str]:
    gain = report.campaign.printed("gains").get(measure.paper_key)
    wins = report.campaign.printed("wins").get(measure.paper_key)
    return (
        w.ABSENT if gain is None else w.percent(-float(gain) / 100),
        w.ABSENT if wins is None else str(wins),
    )
