"""Which pictures the evidence allows, and their numbers; `pictures` paints them.

A picture whose campaigns are absent or unfinished is not drawn, so nothing links to it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gomuon.lab.evidence import contest
from gomuon.lab.evidence.beside import figures_of, printed_share
from gomuon.lab.evidence.reading import Evidence, Study, grokked_at
from gomuon.lab.evidence.slots import TASKS
from gomuon.lab.evidence.thinning import Curve
from gomuon.lab.experiments.catalogue import EXPERIMENTS
from gomuon.lab.experiments.loss_windows import window_name

HALF = 2  # blocks on each side of a smoothed point
DECIMALS = 4  # what is drawn is rounded, so that no last bit of a machine shows

NAMES = ("trajectories", "grokking", "comparison")

Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Series:
    """A comparison in a panel: per seed a line, and what the paper prints for its windows."""

    name: str
    color: int
    lines: tuple[Points, ...]
    mean: Points
    paper: Points = ()


@dataclass(frozen=True)
class Panel:
    title: str
    series: tuple[Series, ...]


@dataclass(frozen=True)
class GrokLine:
    name: str
    color: int
    points: Points
    grok: int | None
    paper: int | None
    main: bool  # at the rate the paper selected


@dataclass(frozen=True)
class GrokPanel:
    title: str
    lines: tuple[GrokLine, ...]


@dataclass(frozen=True)
class DotRow:
    """A method in a race: its seeds and their mean; None where it diverged or never grokked."""

    name: str
    values: tuple[float | None, ...]
    mean: float | None
    remark: str = ""  # why it has no mean


@dataclass(frozen=True)
class DotPanel:
    title: str
    axis: str
    steps: int | None  # for grok steps, drawn on a log axis
    rows: tuple[DotRow, ...]


def trajectories(evidence: Evidence) -> tuple[Panel, ...]:
    """Go-MUON's loss in per cent of its controls' on the corpora."""
    panels = []
    for name in ("ptb", "shakespeare"):
        study = _whole(evidence, name)
        if study is None:
            continue
        series = [
            _series(study, name, control, candidate, color)
            for color, (control, candidate) in enumerate(EXPERIMENTS[name].comparisons)
        ]
        if all(one.lines for one in series):
            panels.append(Panel(TASKS[name], tuple(series)))
    return tuple(panels)


def _whole(evidence: Evidence, name: str) -> Study | None:
    study = evidence.get(name)
    return None if study is None or study.shortcoming is not None else study


def _series(study: Study, name: str, control: str, candidate: str, color: int) -> Series:
    lines = []
    for seed in study.campaign.seeds:
        first, second = (study.curve(study.arm(arm).runs[seed]) for arm in (control, candidate))
        if first is None or second is None or first.updates != second.updates:
            return Series("", color, (), ())
        lines.append(_difference(first, second))
    mean = tuple(
        (points[0][0], round(math.fsum(y for _, y in points) / len(points), DECIMALS))
        for points in zip(*lines, strict=True)
    )
    paper = []
    for window in EXPERIMENTS[name].windows:
        share = printed_share(name, control, candidate, window_name(window))
        if share is not None:
            paper.append((sum(window) / 2, round(100 * share, DECIMALS)))
    title = study.arm(control).title
    return Series(f"against {title}", color, tuple(lines), mean, tuple(paper))


def _difference(control: Curve, candidate: Curve) -> Points:
    """Per cent by which the smoothed candidate lies above the smoothed control."""
    first, second = smooth(control.loss), smooth(candidate.loss)
    return tuple(
        (float(end), round(100 * (b / a - 1), DECIMALS))
        for end, a, b in zip(control.ends, first, second, strict=True)
    )


def smooth(values: Sequence[float]) -> list[float]:
    """A running mean over 50 updates, over what there is of them at both ends."""
    found = []
    for i in range(len(values)):
        part = values[max(0, i - HALF) : i + HALF + 1]
        found.append(math.fsum(part) / len(part))
    return found


def grokking(evidence: Evidence) -> tuple[GrokPanel, ...]:
    """Held-out accuracy of every run of the screen, once the paper's rates are in."""
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
                    GrokLine(
                        arm.title,
                        colors.get(arm.optimizer, 2),
                        points,
                        grokked_at(run),
                        figures.get("grok_step"),
                        arm.name in chosen,
                    )
                )
        panels.append(GrokPanel(f"Modular addition, {group}", tuple(lines)))
    return tuple(panels)


def comparison(evidence: Evidence) -> tuple[DotPanel, ...]:
    """Every race's methods, each panel in the order of its own standing."""
    panels = []
    for task, title in TASKS.items():
        race = _whole(evidence, f"race-{task}")
        if race is None:
            continue
        places = contest.standings(race)
        steps = race.campaign.steps if task == "grokking" else None
        finite = [p.mean for p in places if math.isfinite(p.mean)]
        if not finite:
            continue
        axis = "updates to grok" if steps else "% above the lowest mean loss"
        rows = tuple(_dots(place, min(finite), steps) for place in places)
        panels.append(DotPanel(f"{title[0].upper()}{title[1:]}", axis, steps, rows))
    return tuple(panels)


def _dots(place: contest.Place, best: float, steps: int | None) -> DotRow:
    def value(of: float) -> float | None:
        if not math.isfinite(of) or (steps is not None and of > steps):
            return None
        return of if steps is not None else round(100 * (of / best - 1), DECIMALS)

    values = tuple(value(one) for one in place.values)
    lost = values.count(None)
    words = "diverged" if math.inf in place.values else "never"
    remark = words if lost == len(values) else f"{lost} × {words}"
    return DotRow(place.name, values, None if lost else value(place.mean), remark if lost else "")


def limit(panel: DotPanel) -> float:
    """Where a panel's axis ends: one method far behind must not flatten all the others."""
    if panel.steps is not None:
        return 1.2 * panel.steps  # with room for those that never do
    means = sorted(row.mean for row in panel.rows if row.mean is not None)
    usual = means[(3 * (len(means) - 1)) // 4]
    highest = max(value for row in panel.rows for value in row.values if value is not None)
    return min(highest, max(2 * usual, 1.0))
