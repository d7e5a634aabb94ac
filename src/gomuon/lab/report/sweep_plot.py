"""The plot of a sweep: the statistic of each method over its rates, with its seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from gomuon.lab.report.document import Plot
from gomuon.lab.report.svg import Style, label, make_plot

DASHES = ("-", (0, (4, 2)), (0, (1, 1.5)), (0, (5, 1, 1, 1)))
MARKERS = ("o", "s", "^", "D")


# What is cut off: statistics this many gaps between the best and the worst method above the latter.
REACH = 2.0


@dataclass(frozen=True)
class SweepPoint:
    """A rate, its statistic and that of each seed; the statistic is None if a run diverged."""

    rate: float
    score: float | None
    by_seed: tuple[float, ...] = ()


@dataclass(frozen=True)
class SweepLine:
    """One method with one momentum, at all its rates."""

    name: str
    color: int
    dash: int
    points: tuple[SweepPoint, ...]
    picked: float | None  # the picked rate, if it is on this line


def sweep(caption: str, alt: str, lines: Sequence[SweepLine], quantity: str) -> Plot:
    """Statistic over rate on a log axis; circles mark picked rates, crosses diverged ones.

    A band goes from the lowest to the highest seed. An arrow at the top is a statistic above it.
    """
    rates = [point.rate for line in lines for point in line.points]
    spread = max(rates) / min(rates)
    top = ceiling(lines)

    def draw_on(figure: Figure, style: Style) -> None:
        axes = figure.subplots()
        _ticks(axes, style.wide or spread < 20)
        for line in lines:
            _line(axes, line, top, style)
        axes.autoscale_view()
        if math.isfinite(top):
            axes.set_ylim(top=top)
        axes.set_xlabel("peak matrix rate (log scale)")
        axes.set_ylabel(quantity)
        columns = max(1, (100 if style.wide else 36) // (8 + max(len(line.name) for line in lines)))
        axes.legend(
            loc="lower left",
            bbox_to_anchor=(0, 1.02),
            ncols=min(len(lines), columns),
            borderaxespad=0,
            handlelength=2.2,
            columnspacing=1.4,
        )

    return make_plot(caption, alt, draw_on, (3.8, 3.2 + 0.22 * len(lines)))


def _line(axes: Axes, line: SweepLine, highest: float, style: Style) -> None:
    color = style.color(line.color)
    known = [(p.rate, p.score, p.by_seed or (p.score,)) for p in line.points if p.score is not None]
    # What is cut off must not stretch the axis, so it is drawn no higher than its top.
    rates = [rate for rate, _, _ in known]
    axes.plot(
        rates,
        [min(score, 2 * highest) for _, score, _ in known],
        color=color,
        lw=1.8,
        ls=DASHES[line.dash % len(DASHES)],
        marker=MARKERS[line.dash % len(MARKERS)],
        ms=5,
        label=label(line.name),
    )
    if any(len(seeds) > 1 for _, _, seeds in known):
        low, high = ([min(end(seeds), 2 * highest) for _, _, seeds in known] for end in (min, max))
        axes.fill_between(rates, low, high, color=color, alpha=0.16, linewidth=0)
    top = axes.get_xaxis_transform()
    for rate, score, _ in known:
        if rate == line.picked:
            axes.plot([rate], [score], "o", ms=13, mfc="none", mec=color, mew=2)
        if score > highest:
            axes.plot([rate], [0.97], "^", color=color, ms=7, transform=top)
    lost = [point.rate for point in line.points if point.score is None]
    axes.plot(lost, [0.97] * len(lost), "x", color=color, ms=8, mew=2, transform=top)


def ceiling(lines: Sequence[SweepLine]) -> float:
    """Above it statistics are cut off, so that the picked ones can be told apart; often infinite.

    Some rate far from the best one may have ten times its loss.
    """
    scores = [p.score for line in lines for p in line.points if p.score is not None]
    bests = [
        min(of_line)
        for line in lines
        if (of_line := [p.score for p in line.points if p.score is not None])
    ]
    best, worst = min(bests), max(bests)
    found = worst + max(REACH * (worst - best), 0.1 * abs(worst))
    return found if max(scores) > found else math.inf


def _ticks(axes: Axes, roomy: bool) -> None:
    axes.set_xscale("log")
    axes.margins(x=0.06, y=0.12)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if roomy else (1,), numticks=12))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
