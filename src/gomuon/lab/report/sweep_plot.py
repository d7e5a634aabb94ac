"""The plot of a sweep: the statistic of each method over its rates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from gomuon.lab.report.document import Plot
from gomuon.lab.report.svg import Style, label, make_plot

DASHES = ("-", (0, (4, 2)), (0, (1, 1.5)), (0, (5, 1, 1, 1)))
MARKERS = ("o", "s", "^", "D")


@dataclass(frozen=True)
class SweepLine:
    """One method with one momentum: (rate, statistic); None for a rate that diverged."""

    name: str
    color: int
    dash: int
    points: tuple[tuple[float, float | None], ...]
    picked: float | None  # the picked rate, if it is on this line


def sweep(caption: str, alt: str, lines: Sequence[SweepLine], quantity: str) -> Plot:
    """Statistic over rate on a log axis; circles mark picked rates, crosses diverged ones."""
    rates = [rate for line in lines for rate, _ in line.points]
    spread = max(rates) / min(rates)

    def draw_on(figure: Figure, style: Style) -> None:
        axes = figure.subplots()
        _ticks(axes, style.wide or spread < 20)
        for line in lines:
            color = style.color(line.color)
            known = [(rate, score) for rate, score in line.points if score is not None]
            axes.plot(
                [rate for rate, _ in known],
                [score for _, score in known],
                color=color,
                lw=1.8,
                ls=DASHES[line.dash % len(DASHES)],
                marker=MARKERS[line.dash % len(MARKERS)],
                ms=5,
                label=label(line.name),
            )
            for rate, score in known:
                if rate == line.picked:
                    axes.plot([rate], [score], "o", ms=13, mfc="none", mec=color, mew=2)
            lost = [rate for rate, score in line.points if score is None]
            top = axes.get_xaxis_transform()
            axes.plot(lost, [0.97] * len(lost), "x", color=color, ms=8, mew=2, transform=top)
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


def _ticks(axes: Axes, roomy: bool) -> None:
    axes.set_xscale("log")
    axes.margins(x=0.06, y=0.12)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if roomy else (1,), numticks=12))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
