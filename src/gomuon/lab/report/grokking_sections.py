"""Sections of a report on modular addition: which arms grok, when, and whether it lasts."""

from __future__ import annotations

import math
from typing import Any

from gomuon.lab import formatting as w
from gomuon.lab.errors import LabError
from gomuon.lab.report import plots, target_sections
from gomuon.lab.report.common_sections import nothing_yet, paper_notes
from gomuon.lab.report.document import Block, Cell, Note, Section, Standing, Table
from gomuon.lab.report.target_sections import TimedArm
from gomuon.lab.results.campaigns import ArmRuns
from gomuon.lab.results.grokking_outcomes import NEVER, GrokOutcomes, outcome
from gomuon.lab.results.runs import METRICS, Run


def headline(report: GrokOutcomes) -> str:
    compared = []
    for control, candidate in report.headline_pairs():
        ours, theirs = report.mean_grok_step(candidate), report.mean_grok_step(control)
        if ours is not None and theirs is not None:
            compared.append((control, candidate, ours, theirs))
    if len(compared) > 1 and all(report.all_grokked(*pair) for *pair, _, _ in compared):
        control, candidate = compared[0][:2]
        ratios = [f"{b / a:.1f} times at {arm.group}" for _, arm, a, b in compared]
        return f"{candidate.title} groks faster than {control.title}: {w.listing(ratios)}"
    if compared:
        return ". ".join(_told(report, *one) for one in compared)
    ranking = report.ranked(list(report.campaign.arms))
    if not ranking:
        return nothing_yet(report.campaign)
    arm, grokked = ranking[0]
    if math.isinf(grokked):
        return f"{arm.title} does not grok within {w.many(report.campaign.steps, 'update')}"
    return f"{arm.title} groks after {report.grok_step_text(arm)} updates"


def _told(
    report: GrokOutcomes, control: ArmRuns, candidate: ArmRuns, ours: float, theirs: float
) -> str:
    where = f" at {candidate.group}" if candidate.group else ""
    within = f"within {w.many(report.campaign.steps, 'update')}"
    if math.isinf(ours) and math.isinf(theirs) and report.campaign.race:
        reached = 100 * report.final_accuracy(candidate)
        ahead = f"{candidate.title} is ahead with {reached:.1f} % held out"
        return f"No arm groks {within}; {ahead}"
    if math.isinf(ours) and math.isinf(theirs):
        return f"Neither {candidate.title} nor {control.title} groks {within}{where}"
    if math.isinf(ours):
        return f"{candidate.title} does not grok {within}{where}; {control.title} does"
    if math.isinf(theirs):
        first = f"{candidate.title} groks after {report.grok_step_text(candidate)} updates{where}"
        return f"{first}; {control.title} not within {report.campaign.steps:,}"
    if not report.all_grokked(candidate, control):
        first = f"{candidate.title} groks after {report.grok_step_text(candidate)} updates{where}"
        return f"{first}, {control.title} after {report.grok_step_text(control)}"
    return (
        f"{candidate.title} groks {theirs / ours:.1f} times as fast as {control.title}{where}: "
        f"{ours:,.0f} updates against {theirs:,.0f}"
    )


def evidence(report: GrokOutcomes) -> str:
    """How certain a race's headline is, if it has several seeds."""
    told = []
    for control, candidate in report.headline_pairs() if report.campaign.race else ():
        found = report.judge(control, candidate)
        if found is None or not math.isfinite(found.comparison.low):
            continue
        whole, count = found.comparison, len(found.comparison.paired.differences)
        text = (
            f"Against {control.title}: first on {found.first} of {w.many(count, 'seed')}, mean "
            f"difference {w.signed(whole.paired.mean, 0)} updates, 95 % interval "
            f"{w.interval(whole.low, whole.high, 0)}"
        )
        if whole.family > 1:
            text += f", widened because this is one of {whole.family} pairs of arms"
        if not whole.differs:
            text += ". These seeds cannot tell them apart"
        told.append(f"{text}.")
    return " ".join(told)


def standings(report: GrokOutcomes) -> tuple[Standing, ...]:
    campaign = report.campaign
    compared = {name for pair in campaign.comparisons for name in pair}
    rows = []
    for group in campaign.groups:
        arms = [arm for arm in campaign.members(group) if not compared or arm.name in compared]
        ranking = report.ranked(arms)
        for place, (arm, grokked) in enumerate(ranking, start=1):
            rows.append(_standing(report, arm, place, grokked, ranking[0][1], len(ranking) > 1))
    return tuple(rows)


def _standing(
    report: GrokOutcomes, arm: ArmRuns, place: int, grokked: float, first: float, contested: bool
) -> Standing:
    name = f"{arm.title}, {arm.group}" if arm.group else arm.label
    diverged = report.diverged(arm)
    if math.isinf(grokked):
        return Standing(
            place=f"{place}.",
            name=name,
            result=f"{100 * report.final_accuracy(arm):.1f} %",
            unit=f"held out after {w.many((diverged or report.campaign.steps + 1) - 1, 'update')}",
            remark="not grokked" if diverged is None else f"diverged at update {diverged:,}",
            color=arm.color,
        )
    remark = "first to grok" if place == 1 else f"{grokked / first:.1f} times the first's updates"
    if not report.all_grokked(arm):
        outcomes = report.ranked_outcomes(arm)
        done = sum(outcome["grok_step"] is not None for outcome in outcomes)
        remark = f"groks on {done} of {w.many(len(outcomes), 'seed')}"
    return Standing(
        place=f"{place}.",
        name=name,
        result=report.grok_step_text(arm),
        unit="updates to sustained 99 % held out",
        remark=remark,
        color=arm.color,
        winner=place == 1 and contested,
    )


def sections(report: GrokOutcomes) -> list[Section]:
    title = "The paper's table, and this one" if report.campaign.paper else "Results"
    found = [
        Section("Accuracy", _curves(report)),
        Section(title, (_results(report), *_screen(report), *paper_notes(report.campaign))),
    ]
    if len(report.campaign.seeds) > 1:
        found.append(_times(report))
        found.append(Section("Seed by seed", (_by_seed(report),)))
    return [section for section in found if section.blocks]


def _times(report: GrokOutcomes) -> Section:
    """When the seeds of each arm grok, with those that do not."""
    groups = {}
    for group in report.campaign.groups:
        timed = {
            arm.name: TimedArm(arm.title, arm.color, report.times(arm))
            for arm in report.campaign.members(group)
        }
        pairs = [
            (timed[control.name], timed[candidate.name])
            for control, candidate in report.comparisons()
            if candidate.name in timed
        ]
        groups[group] = (list(timed.values()), pairs)
    return target_sections.section(
        "Time to 99 % held out", "sustained 99 % held out", report.campaign.steps, groups
    )


def _curves(report: GrokOutcomes) -> tuple[Block, ...]:
    panels = []
    for group in report.campaign.groups:
        runs = [
            plots.AccuracyCurve(arm.title, arm.color, *_points(run), _grok_of(run))
            for arm in report.campaign.members(group)
            for run in arm.runs.values()
            if run.metrics
        ]
        if runs:
            panels.append(plots.AccuracyPanel(group, tuple(runs)))
    if not panels:
        return (Note("No update has been recorded yet.", "quiet"),)
    told = []
    for arm in report.campaign.arms:
        grokked = report.mean_grok_step(arm)
        if grokked is not None:
            where = f" ({arm.group})" if arm.group else ""
            when = (
                "does not grok"
                if math.isinf(grokked)
                else f"groks at update {report.grok_step_text(arm)}"
            )
            told.append(f"{arm.title}{where} {when}")
    alt = "Held-out and training accuracy against updates. "
    alt += f"{w.listing(told)}." if told else "No run has finished yet."
    caption = (
        "Accuracy after each update, on a log axis. Fitting the training pairs comes first "
        "(dashed); grokking is the later rise on pairs never seen in training (solid). Marked: the "
        "first of five consecutive evaluations of at least 99 %; of many seeds the median has its "
        "number."
    )
    return (plots.grokking(caption, alt, panels),)


def _points(run: Run) -> tuple[tuple[tuple[int, float], ...], tuple[tuple[int, float], ...]]:
    def of(name: str) -> tuple[tuple[int, float], ...]:
        return tuple((int(m["step"]), float(m[name])) for m in run.metrics if name in m)

    try:
        return of("train_accuracy"), of("test_accuracy")
    except (KeyError, TypeError, ValueError) as error:
        raise LabError(f"{run.folder / METRICS}: a line has no step ({error})") from error


def _grok_of(run: Run) -> int | None:
    step = outcome(run)["grok_step"] if run.metrics else None
    return None if step is None else int(step)


def _results(report: GrokOutcomes) -> Table:
    campaign = report.campaign
    rows: list[tuple[Cell | str, ...]] = []
    for group in campaign.groups:
        arms = campaign.members(group)
        steps = [step for arm in arms if (step := report.mean_grok_step(arm)) is not None]
        rows += [(group,)] if group else []
        rows += [_result_row(report, arm, min(steps, default=NEVER)) for arm in arms]
    columns = ["arm"]
    for measured in ("train 99 %", "grok 99 %", "delay"):
        columns += [measured, "paper"] if campaign.paper else [measured]
    columns += ["later failures"] if campaign.race else ["later failures", "speed-up", "paper"]
    many = ""
    if len(campaign.seeds) > 1:
        many = "means over seeds, a run that never groks counts as one update more than it made; "
    return Table(
        f"Updates to 99 % accuracy on training and held-out pairs ({many}lower is better). Later "
        "failures: evaluations below 99 % after the grok step, which do not redefine it."
        + ("" if campaign.race else " Speed-up: the control's grok step over this one's."),
        tuple(columns),
        tuple(rows),
    )


def _result_row(report: GrokOutcomes, arm: ArmRuns, best: float) -> tuple[Cell | str, ...]:
    grokked = report.mean_grok_step(arm)
    never = grokked is not None and math.isinf(grokked)
    outcomes = report.ranked_outcomes(arm)
    cells: list[Cell | str] = [arm.label]
    theirs = report.campaign.printed("grokking").get(arm.name, {})
    for name in ("train_99_step", "grok_step", "delay"):
        if name == "grok_step":
            words = w.ABSENT if grokked is None else report.grok_step_text(arm)
            cells.append(Cell(words, best=grokked == best < NEVER))
        else:
            cells.append(_mean(outcomes, name))
        if report.campaign.paper:
            cells.append(w.step(theirs.get(name)))
    lost = sum(len(outcome["retention_failures"]) for outcome in outcomes)
    cells.append(w.ABSENT if never or not outcomes else f"{lost:,}")
    if not report.campaign.race:
        cells += [_speed_up(report, arm), _printed_speed_up(report, arm)]
    return tuple(cells)


def _speed_up(report: GrokOutcomes, arm: ArmRuns) -> str:
    ours = report.mean_grok_step(arm)
    for control, candidate in report.comparisons():
        theirs = report.mean_grok_step(control)
        if (
            candidate.name == arm.name
            and ours
            and theirs
            and report.all_grokked(control, candidate)
        ):
            return f"{theirs / ours:.1f}×"
    return w.ABSENT


def _printed_speed_up(report: GrokOutcomes, arm: ArmRuns) -> str:
    printed = report.campaign.printed("gains").get(f"{arm.group} speedup")
    candidates = {candidate.name for _, candidate in report.comparisons()}
    return w.ABSENT if printed is None or arm.name not in candidates else f"{float(printed):.1f}×"


def _mean(outcomes: list[dict[str, Any]], name: str) -> str:
    values = [o[name] for o in outcomes if o[name] is not None]
    if not values or len(values) < len(outcomes):
        return w.ABSENT
    return w.step(math.fsum(values) / len(values))


def _screen(report: GrokOutcomes) -> list[Note]:
    """The rates that the plan's rule selects: the lowest sum of grok steps over the groups."""
    campaign = report.campaign
    sums: dict[str, dict[float, float]] = {}
    for arm in campaign.arms:
        grokked, rate = report.mean_grok_step(arm), arm.rate
        if not campaign.paper or grokked is None or rate is None:
            return []
        by_rate = sums.setdefault(arm.optimizer, {})
        by_rate[rate] = by_rate.get(rate, 0.0) + min(grokked, campaign.steps + 1)
    chosen = [
        f"{rate:g} for {optimizer}"
        for optimizer, by_rate in sums.items()
        for rate in [min(by_rate, key=by_rate.__getitem__)]
        if len(by_rate) > 1
    ]
    return [Note(f"The plan's rule selects here rate {w.listing(chosen)}.")] if chosen else []


def _by_seed(report: GrokOutcomes) -> Table:
    seeds = report.campaign.seeds
    rows = []
    for arm in report.campaign.arms:
        outcomes = report.outcomes[arm.name]
        cells = [
            (w.step(outcomes[s]["grok_step"]) if outcomes[s]["grok_step"] is not None else "never")
            if s in outcomes
            else "unfinished"
            for s in seeds
        ]
        rows.append((f"{arm.title} {arm.group}".strip(), *cells))
    return Table("Grok step of each seed.", ("arm", *(f"seed {s}" for s in seeds)), tuple(rows))
