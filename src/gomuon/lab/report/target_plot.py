"""The plot of times to a target: the share of seeds that have reached it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter

from gomuon.lab.report.document import Plot
from gomuon.lab.report.plots import draw_legend
from gomuon.lab.report.svg import Style, label, make_plot


@dataclass(frozen=True)
class Reaching:
    """An arm's estimate: the share that is still short of the target after each time."""

    name: str
    color: int
    times: tuple[float, ...]
    short: tuple[float, ...]


def reaching(caption: str, alt: str, arms: Sequence[Reaching], horizon: int) -> Plot:
    """Steps that rise from 0 to the share that reaches the target within the horizon."""

    def draw_on(figure: Figure, style: Style) -> None:
        axes = figure.subplots()
        for index, arm in enumerate(arms):
            color = style.color(arm.color)
            # Curves that meet stay visible: each is raised by a little more than the one before.
            raised = 0.7 * (index - (len(arms) - 1) / 2)
            times = [0.0, *arm.times, float(horizon)]
            shares = [0.0, *(100 * (1 - short) for short in arm.short)]
            shares = [*shares, shares[-1]]
            axes.plot(
                times,
                [share + raised for share in shares],
                drawstyle="steps-post",
                color=color,
                lw=2,
                label=label(arm.name),
            )
            if arm.short and arm.short[-1] > 0:
                end = [horizon], [shares[-1] + raised]
                axes.plot(*end, "|", color=color, ms=11, mew=2, clip_on=False)
        draw_legend(axes, style)
        axes.set_xlim(0, horizon)
        axes.set_ylim(-4, 104)
        axes.yaxis.set_major_locator(FixedLocator([0, 25, 50, 75, 100]))
        axes.set_ylabel("seeds, %")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.set_xlabel("update")

    return make_plot(caption, alt, draw_on, (3.2, 3.1))
