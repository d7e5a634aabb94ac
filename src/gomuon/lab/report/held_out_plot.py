"""The plot of losses on held-out data, at the updates at which they were evaluated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from gomuon.lab.report.document import Plot
from gomuon.lab.report.plots import draw_legend
from gomuon.lab.report.svg import Style, label, make_plot

WIDE_RANGE = 20  # of the largest over the smallest loss: from there on the axis is logarithmic


@dataclass(frozen=True)
class HeldOutCurve:
    """The evaluations of an arm: (update, the loss of each seed)."""

    name: str
    color: int
    points: tuple[tuple[int, tuple[float, ...]], ...]


def held_out(caption: str, alt: str, arms: Sequence[HeldOutCurve], quantity: str) -> Plot:
    """The mean over seeds at each evaluation, and a band from the lowest seed to the highest."""
    values = [value for arm in arms for _, seeds in arm.points for value in seeds]
    is_log = min(values) > 0 and max(values) > WIDE_RANGE * min(values)

    def draw_on(figure: Figure, style: Style) -> None:
        axes = figure.subplots()
        for arm in arms:
            color = style.color(arm.color)
            steps = [step for step, _ in arm.points]
            means = [sum(seeds) / len(seeds) for _, seeds in arm.points]
            axes.plot(steps, means, color=color, lw=1.8, marker="o", ms=4, label=label(arm.name))
            if any(len(seeds) > 1 for _, seeds in arm.points):
                low, high = ([end(seeds) for _, seeds in arm.points] for end in (min, max))
                axes.fill_between(steps, low, high, color=color, alpha=0.16, linewidth=0)
        if is_log:
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
            axes.yaxis.set_minor_locator(NullLocator())
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        draw_legend(axes, style)
        axes.set_xlim(left=0)
        axes.set_ylabel(quantity)
        axes.set_xlabel("update")

    return make_plot(caption, alt, draw_on, (3.4, 3.2))
