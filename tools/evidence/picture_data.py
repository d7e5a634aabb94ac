"""The numbers of every picture; `picture_drawing` draws them.

A picture whose campaigns are absent or unfinished has no panels and is not drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gomuon.lab.experiments.catalogue import EXPERIMENTS
from gomuon.lab.experiments.loss_windows import window_name
from tools.evidence.campaign_list import TASKS
from tools.evidence.paper_lookup import figures_of, published_gain
from tools.evidence.ranking import RankedMethod, ranking
from tools.evidence.studies import Evidence, Study, recorded_grok_step
from tools.evidence.thinned_curve import Curve

HALF = 2  # blocks on each side of a smoothed point
DECIMALS = 4  # drawn numbers are rounded, so that every machine draws the same picture

NAMES = ("trajectories", "grokking", "comparison")

Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class LossComparison:
    """Go-MUON against one control: a line per seed, their mean, and the paper's windows."""

    name: str
    color: int
    lines: tuple[Points, ...]
    mean: Points
    paper: Points = ()


@dataclass(frozen=True)
class LossPanel:
    title: str
    comparisons: tuple[LossComparison, ...]


@dataclass(frozen=True)
class AccuracyLine:
    name: str
    color: int
    points: Points
    grok: int | None
    paper: int | None
    main: bool  # whether it is at the rate that the paper selected


@dataclass(frozen=True)
class GrokkingPanel:
    title: str
    lines: tuple[AccuracyLine, ...]


@dataclass(frozen=True)
class RankingRow:
    """A method in a race: its seeds and their mean; None where it diverged or never grokked."""

    name: str
    values: tuple[float | None, ...]
    mean: float | None
    remark: str = ""  # why it has no mean


@dataclass(frozen=True)
class RankingPanel:
    title: str
    axis: str
    steps: int | None  # for grok steps, drawn on a log axis
    rows: tuple[RankingRow, ...]


def loss_panels(evidence: Evidence) -> tuple[LossPanel, ...]:
    """Go-MUON's loss relative to each control on the corpora, in per cent."""
    panels = []
    for name in ("ptb", "shakespeare"):
        study = _finished(evidence, name)
        if study is None:
            continue
        series = [
            _series(study, name, control, candidate, color)
            for color, (control, candidate) in enumerate(EXPERIMENTS[name].comparisons)
        ]
        if all(one.lines for one in series):
            panels.append(LossPanel(TASKS[name], tuple(series)))
    return tuple(panels)


def _finished(evidence: Evidence, name: str) -> Study | None:
    study = evidence.get(name)
    return None if study is None or study.shortcoming is not None else study


def _series(study: Study, name: str, control: str, candidate: str, color: int) -> LossComparison:
    lines = []
    for seed in study.campaign.seeds:
        first, second = (study.curve(study.arm(arm).runs[seed]) for arm in (control, candidate))
        if first is None or second is None or first.updates != second.updates:
            return LossComparison("", color, (), ())
        lines.append(_difference(first, second))
    mean = tuple(
        (points[0][0], round(math.fsum(y for _, y in points) / len(points), DECIMALS))
        for points in zip(*lines, strict=True)
    )
    paper = []
    for window in EXPERIMENTS[name].windows:
        share = published_gain(name, control, candidate, window_name(window))
        if share is not None:
            paper.append((sum(window) / 2, round(100 * share, DECIMALS)))
    title = study.arm(control).title
    return LossComparison(f"against {title}", color, tuple(lines), mean, tuple(paper))


def _difference(control: Curve, candidate: Curve) -> Points:
    """Per cent by which the smoothed candidate lies above the smoothed control."""
    first, second = smooth(control.loss), smooth(candidate.loss)
    return tuple(
        (float(end), round(100 * (b / a - 1), DECIMALS))
        for end, a, b in zip(control.ends, first, second, strict=True)
    )


def smooth(values: Sequence[float]) -> list[float]:
    """A running mean over 50 updates; over fewer at both ends."""
    found = []
    for i in range(len(values)):
        part = values[max(0, i - HALF) : i + HALF + 1]
        found.append(math.fsum(part) / len(part))
    return found


def accuracy_panels(evidence: Evidence) -> tuple[GrokkingPanel, ...]:
    """Held-out accuracy of every run of the screen, once those at the paper's rates are there."""
    study = evidence.get("grokking")
    chosen = [name for pair in EXPERIMENTS["grokking"].comparisons for name in pair]
    if study is None or not study.complete(chosen):
        return ()
    colors = {"go-muon": 0, "muon": 1}
    panels = []
    for group in study.campaign.groups:
        lines = []
        for arm in study.campaign.members(group):
            for run in arm.finished.values():
                curve = study.curve(run)
                if curve is None:
                    return ()
                points = tuple((float(step), 100 * value) for step, value in curve.test_points)
                figures = figures_of("grokking").grokking.get(arm.name, {})
                lines.append(
                    AccuracyLine(
                        arm.title,
                        colors.get(arm.optimizer, 2),
                        points,
                        recorded_grok_step(run),
                        figures.get("grok_step"),
                        arm.name in chosen,
                    )
                )
        panels.append(GrokkingPanel(f"Modular addition, {group}", tuple(lines)))
    return tuple(panels)


def ranking_panels(evidence: Evidence) -> tuple[RankingPanel, ...]:
    """The methods of every race, a panel each, best first."""
    panels = []
    for task, title in TASKS.items():
        race = _finished(evidence, f"race-{task}")
        if race is None:
            continue
        methods = ranking(race)
        steps = race.campaign.steps if task == "grokking" else None
        finite = [m.mean for m in methods if math.isfinite(m.mean)]
        if not finite:
            continue
        axis = "updates to grok" if steps else "% above the lowest mean loss"
        rows = tuple(_row(method, min(finite), steps) for method in methods)
        panels.append(RankingPanel(f"{title[0].upper()}{title[1:]}", axis, steps, rows))
    return tuple(panels)


def _row(method: RankedMethod, best: float, steps: int | None) -> RankingRow:
    def value(of: float) -> float | None:
        if not math.isfinite(of) or (steps is not None and of > steps):
            return None
        return of if steps is not None else round(100 * (of / best - 1), DECIMALS)

    values = tuple(value(one) for one in method.values)
    lost = values.count(None)
    words = "diverged" if math.inf in method.values else "never"
    remark = words if lost == len(values) else f"{lost} × {words}"
    return RankingRow(
        method.name, values, None if lost else value(method.mean), remark if lost else ""
    )


def axis_end(panel: RankingPanel) -> float:
    """Where a panel's axis ends, so that one method far behind does not flatten the others."""
    if panel.steps is not None:
        return 1.2 * panel.steps  # with room for runs that never grok
    means = sorted(row.mean for row in panel.rows if row.mean is not None)
    usual = means[(3 * (len(means) - 1)) // 4]
    highest = max(value for row in panel.rows for value in row.values if value is not None)
    return min(highest, max(2 * usual, 1.0))
