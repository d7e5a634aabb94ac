"""Paired differences of character models, as tables and a plot."""

from __future__ import annotations

import math

from gomuon.lab import formatting as w
from gomuon.lab.report import plots
from gomuon.lab.report.document import Block, Table
from gomuon.lab.results.campaigns import ArmRuns
from gomuon.lab.results.language_outcomes import LanguageOutcomes, Measure, PairedSeeds


def differences(report: LanguageOutcomes) -> tuple[Block, ...]:
    tables: list[Block] = []
    drawn: list[plots.DifferenceRow] = []
    pairs = report.comparisons()
    for index, (control, candidate) in enumerate(pairs):
        rows = []
        for measure in report.measures:
            result = report.paired(control, candidate, measure)
            if result is None:
                continue
            # The paper has one comparison per experiment: the first one of the plan.
            theirs = _paper_difference(report, measure) if index == 0 else (w.ABSENT, w.ABSENT)
            rows.append((measure.title, *_figures(result), *theirs, *_by_seed(report, result)))
            drawn += _difference_row(measure, control, candidate, result, len(pairs) > 1)
        if rows:
            tables.append(_difference_table(report, control, candidate, rows))
    if not drawn:
        return tuple(tables)
    told = [f"{row.name} {row.legend} {w.signed(row.mean, 2)} %" for row in drawn]
    plot = plots.paired_differences(
        "Relative paired differences; left of zero the loss is lower. Dots are seeds, a diamond is "
        "their mean and a bar its 95 % interval.",
        f"Mean differences in per cent of the control: {w.listing(told)}.",
        drawn,
    )
    return (plot, *tables)


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


def _difference_row(
    measure: Measure, control: ArmRuns, candidate: ArmRuns, result: PairedSeeds, several: bool
) -> list[plots.DifferenceRow]:
    scale = 100 * result.relative / result.mean if result.mean else 0.0
    if not math.isfinite(scale):
        return []
    return [
        plots.DifferenceRow(
            measure.title,
            control.color if several else candidate.color,
            tuple(scale * d for d in result.differences.values()),
            100 * result.relative,
            scale * result.low,
            scale * result.high,
            f"against {control.title}" if several else "",
        )
    ]


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
