"""Sections of a report on character models: loss windows, paired differences, curves."""

from __future__ import annotations

import math

from gomuon.lab import formatting as w
from gomuon.lab.errors import LabError
from gomuon.lab.experiments.run_config import VALIDATION_LOSS
from gomuon.lab.report import difference_sections, plots, target_sections
from gomuon.lab.report.common_sections import nothing_yet, paper_notes
from gomuon.lab.report.document import Block, Cell, Note, Section, Standing, Table
from gomuon.lab.report.held_out_plot import HeldOutCurve, held_out
from gomuon.lab.report.target_sections import TimedArm
from gomuon.lab.results.campaigns import ArmRuns, Campaign
from gomuon.lab.results.comparisons import Comparison
from gomuon.lab.results.language_outcomes import (
    GEOMETRIC_MEAN,
    LanguageOutcomes,
    Measure,
    held_out_course,
    outcome,
)
from gomuon.lab.results.runs import METRICS, Run


def headline(report: LanguageOutcomes) -> str:
    ranking = report.ranked()
    if not ranking:
        return nothing_yet(report.campaign)
    pairs = [(c, d, report.judge(c, d)) for c, d in report.headline_pairs()]
    told = [(control, candidate, found) for control, candidate, found in pairs if found is not None]
    if not told:
        arm, value = ranking[0]
        return f"{arm.title}: loss {w.loss(value)} ({report.deciding.title})"
    parts = [_gain(report, control, found) for control, _, found in told]
    return f"{told[0][1].title} has {w.listing(parts)}"


def _gain(report: LanguageOutcomes, control: ArmRuns, found: Comparison) -> str:
    result = found.paired
    if math.isnan(result.mean):
        return f"no result against {control.title}, because a run diverged"
    way = "lower" if result.mean < 0 else "higher"
    held_out = report.deciding.key == VALIDATION_LOSS
    loss = report.deciding.title if held_out else "training loss"
    text = f"{abs(100 * result.relative):.2f} % {way} {loss} than {control.title}"
    if found.low <= 0 <= found.high:
        text += f", which {w.many(len(result.differences), 'seed')} cannot tell from a tie"
    return text


def evidence(report: LanguageOutcomes) -> str:
    """How certain the difference in the headline is."""
    told = []
    for control, candidate in report.headline_pairs():
        found = report.judge(control, candidate)
        if found is None or not math.isfinite(found.paired.mean):
            continue
        result = found.paired
        count = len(result.differences)
        text = f"Against {control.title}: lower on {result.wins} of {w.many(count, 'seed')}"
        if math.isfinite(found.low) and result.mean:
            scale = result.relative / result.mean
            low, high = scale * found.low, scale * found.high
            text += f", 95 % interval {w.percent(low)} to {w.percent(high)}"
        if found.family > 1 and count > 1:
            text += f", widened because this is one of {found.family} pairs of arms"
        told.append(f"{text}.")
    return " ".join(told)


def loss_name(measure: str) -> str:
    """A measure as the name of a quantity: "loss, geometric mean", but "validation loss"."""
    return measure if measure.endswith("loss") else f"loss, {measure}"


def standings(report: LanguageOutcomes) -> tuple[Standing, ...]:
    ranking = report.ranked()
    rows = []
    for place, (arm, value) in enumerate(ranking, start=1):
        best = ranking[0][1]
        remark = "lowest loss" if place == 1 else _behind(value / best)
        if not math.isfinite(value):
            remark = "diverged"
        elif len(ranking) == 1:
            remark = "the only arm with results"
        rows.append(
            Standing(
                place=f"{place}.",
                name=arm.label,
                result=f"{value:.4f}" if math.isfinite(value) else "–",
                unit=loss_name(report.deciding.title),
                remark=remark.replace("+", ""),
                color=arm.color,
                winner=place == 1 and len(ranking) > 1,
            )
        )
    return tuple(rows)


def _behind(ratio: float) -> str:
    """How far a loss is above the first one's."""
    if ratio >= 2:
        return f"{ratio:.1f} times the first's"
    return f"{w.percent(ratio - 1)} above the first"


def sections(report: LanguageOutcomes) -> list[Section]:
    found = [Section("Loss curves", (*_curves(report), *_held_out(report)))]
    title = "The paper's table, and this one" if report.campaign.paper else "Results"
    found.append(Section(title, (_results(report), *paper_notes(report.campaign))))
    found += difference_sections.sections(report)
    found.append(_to_target(report))
    if report.campaign.tuning:
        found.append(Section("Tuning runs", (_tuning(report),)))
    return [section for section in found if section.blocks]


def _to_target(report: LanguageOutcomes) -> Section:
    """The updates to the loss that the plan declares; empty if it declares none."""
    target = report.campaign.target
    if target is None:
        return Section("Time to the target", ())
    kind = "mean training loss of a fortieth of the run"
    if report.deciding.key == VALIDATION_LOSS:
        kind = report.deciding.title
    timed = {
        arm.name: TimedArm(arm.title, arm.color, report.times(arm, target))
        for arm in report.campaign.arms
    }
    pairs = [(timed[c.name], timed[d.name]) for c, d in report.comparisons()]
    return target_sections.section(
        "Time to the target",
        f"{'an' if kind[0] in 'aeiou' else 'a'} {kind} of {target:g}",
        report.campaign.steps,
        {"": (list(timed.values()), pairs)},
    )


def _curves(report: LanguageOutcomes) -> tuple[Block, ...]:
    arms = [_loss_arm(arm) for arm in report.campaign.arms if _losses(arm)]
    if not arms:
        return (Note("No update has been recorded yet.", "quiet"),)
    reference, others = _reference(report)
    differences = []
    for arm in others:
        rows = []
        for seed in arm.runs:
            if reference is not None and seed in reference.runs:
                ours, theirs = _series(arm.runs[seed]), _series(reference.runs[seed])
                rows.append(tuple(a - b for a, b in zip(ours, theirs, strict=False)))
        if rows := [row for row in rows if row]:
            differences.append(plots.LossCurves(arm.title, arm.color, tuple(rows)))
    caption = (
        "Training loss before each update. Thin: each seed as it was; bold: smoothed over a "
        "fortieth of the run and averaged over the seeds. Shaded: the windows that are compared."
    )
    if differences and reference is not None:
        caption += f" Below: smoothed difference to {reference.title}, seed by seed."
    ranking = [f"{arm.title} {w.loss(value)}" for arm, value in report.ranked()]
    alt = f"Loss curves of {w.listing([arm.name for arm in arms])}."
    if ranking:
        alt += f" {report.deciding.title.capitalize()}: {w.listing(ranking)}."
    plot = plots.losses(
        caption,
        alt,
        arms,
        report.campaign.windows,
        differences,
        reference.title if reference else "",
    )
    return (plot,)


def _held_out(report: LanguageOutcomes) -> tuple[Block, ...]:
    """The losses on held-out data; empty if none was evaluated."""
    if report.deciding.key != VALIDATION_LOSS:
        return ()
    curves = []
    for arm in report.campaign.arms:
        found: dict[int, list[float]] = {}
        for run in arm.runs.values():
            for step, value in held_out_course(run):
                if math.isfinite(value):
                    found.setdefault(step, []).append(value)
        points = tuple((step, tuple(values)) for step, values in sorted(found.items()))
        if points:
            curves.append(HeldOutCurve(arm.title, arm.color, points))
    if not curves:
        return ()
    name = report.deciding.title
    last = [f"{arm.title} {w.loss(value)}" for arm, value in report.ranked()]
    return (
        held_out(
            f"{name.capitalize()} at each evaluation: the mean over seeds, and a band from the "
            "lowest to the highest.",
            f"{name.capitalize()} against updates. "
            + (f"In the end: {w.listing(last)}." if last else "No run has finished yet."),
            curves,
            name,
        ),
    )


def _reference(report: LanguageOutcomes) -> tuple[ArmRuns | None, list[ArmRuns]]:
    """The arm that is subtracted from others: the only control, else the common candidate."""
    pairs = report.comparisons()
    if not pairs:
        return None, []
    controls = list({control.name: control for control, _ in pairs}.values())
    if len(controls) == 1:
        return controls[0], [candidate for _, candidate in pairs]
    return pairs[0][1], controls


def _series(run: Run) -> tuple[float, ...]:
    try:
        return tuple(float(line["loss"]) for line in run.metrics)
    except (KeyError, TypeError, ValueError) as error:
        raise LabError(f"{run.folder / METRICS}: a line has no loss ({error})") from error


def _losses(arm: ArmRuns) -> tuple[tuple[float, ...], ...]:
    return tuple(series for run in arm.runs.values() if (series := _series(run)))


def _loss_arm(arm: ArmRuns) -> plots.LossCurves:
    return plots.LossCurves(arm.title, arm.color, _losses(arm))


def _results(report: LanguageOutcomes) -> Table:
    """For each arm the published results, ours and their difference; our lowest is bold."""
    campaign, measures = report.campaign, report.measures
    means = {arm.name: [report.mean(arm, m) for m in measures] for arm in campaign.arms}
    best = [
        min((v for v in column if v is not None), default=None)
        for column in zip(*means.values(), strict=True)
    ]
    rows: list[tuple[Cell | str, ...]] = []
    for arm in campaign.arms:
        ours = means[arm.name]
        cells = [
            Cell(w.loss(v), best=v is not None and v == low)
            for v, low in zip(ours, best, strict=True)
        ]
        if not campaign.paper:
            rows.append((arm.title, w.rate(arm.rate), *cells))
            continue
        theirs = _paper_row(campaign, arm)
        rows.append((arm.label,))
        rows.append(("paper", *(w.loss(theirs.get(m.paper_key)) for m in measures)))
        rows.append(("here", *cells))
        if theirs and campaign.label == "full":
            apart = [
                _apart(v, theirs.get(m.paper_key)) for v, m in zip(ours, measures, strict=True)
            ]
            rows.append(("here against paper", *apart))
    seeds = tuple(report.common_seeds())
    caption = "Mean training loss of each window and their geometric mean"
    if report.deciding.key == VALIDATION_LOSS:
        caption += f", and the {report.deciding.title} after the last update, which decides"
    caption += "; lower is better"
    caption += f"; here over {w.seeds(seeds)}." if seeds else "; no seed is finished in every arm."
    heads = tuple(_head(m) if campaign.paper else m.title for m in measures)
    return Table(caption, ("", *heads) if campaign.paper else ("arm", "rate", *heads), tuple(rows))


def _paper_row(campaign: Campaign, arm: ArmRuns) -> dict[str, float]:
    row = dict(campaign.printed("windows").get(arm.name, {}))
    mean = campaign.printed("geometric_mean").get(arm.name)
    return row if mean is None else {**row, GEOMETRIC_MEAN: mean}


def _apart(ours: float | None, theirs: float | None) -> str:
    return w.ABSENT if ours is None or theirs is None else w.percent(ours / theirs - 1)


def _head(measure: Measure) -> str:
    paper = measure.paper_key.replace("-", "–")
    same = measure.title in (paper, GEOMETRIC_MEAN)
    return measure.title if same else f"{measure.title} (paper {paper})"


def _tuning(report: LanguageOutcomes) -> Table:
    means = report.campaign.printed("geometric_mean")
    rows: list[tuple[Cell | str, ...]] = []
    for run in report.campaign.tuning:
        reached = outcome(run, report.campaign)[GEOMETRIC_MEAN] if run.finished else None
        rows.append(
            (
                run.config.arm,
                w.rate(run.config.lr),
                w.loss(reached) if run.finished else "unfinished",
                w.loss(means.get(run.config.arm)),
            )
        )
    return Table(
        "Runs on the tuning seed, from which rates are selected by the plan's rule.",
        ("run", "rate", "geometric mean", "paper"),
        tuple(rows),
    )
