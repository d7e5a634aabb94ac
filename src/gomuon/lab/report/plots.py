"""The plots of a report: loss curves, accuracies and paired differences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from gomuon.lab.report.curves import mean_over_seeds, smooth, thin, thin_extremes, thin_log
from gomuon.lab.report.document import Plot
from gomuon.lab.report.svg import Style, label, make_plot

MANY = 6  # labels of grok steps that a picture has room for


@dataclass(frozen=True)
class LossCurves:
    name: str
    color: int
    losses: tuple[tuple[float, ...], ...]  # one sequence per seed, first entry is update 1


@dataclass(frozen=True)
class AccuracyCurve:
    name: str
    color: int
    train: tuple[tuple[int, float], ...]
    test: tuple[tuple[int, float], ...]
    grok: int | None


@dataclass(frozen=True)
class AccuracyPanel:
    title: str
    runs: tuple[AccuracyCurve, ...]


@dataclass(frozen=True)
class DifferenceRow:
    """Relative differences in per cent, one per seed, with the interval of their mean."""

    name: str
    color: int
    values: tuple[float, ...]
    mean: float
    low: float
    high: float
    legend: str = ""
    outer_low: float = math.nan  # of the interval that holds for several comparisons together
    outer_high: float = math.nan


def losses(
    caption: str,
    alt: str,
    arms: Sequence[LossCurves],
    windows: Sequence[tuple[int, int]],
    differences: Sequence[LossCurves] = (),
    control: str = "",
) -> Plot:
    """Loss over updates, with shaded windows; below, each arm minus the control."""

    def draw_on(figure: Figure, style: Style) -> None:
        ratios = [3, 2] if differences else [1]
        grid = figure.subplots(
            len(ratios), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": ratios}
        )
        top: Axes = grid[0, 0]
        _loss_curves(top, arms, style)
        draw_legend(top, style)
        top.set_ylabel("training loss")
        if differences:
            below: Axes = grid[1, 0]
            _difference_curves(below, differences, style)
            below.set_ylabel(f"loss minus\n{label(control, 16)}")
        for axes in grid[:, 0]:
            for first, last in windows:
                axes.axvspan(first, last, color=style.ink, alpha=0.07, linewidth=0)
        for first, last in windows:
            top.annotate(
                f"{first}–{last}",
                ((first + last) / 2, 1),
                xycoords=top.get_xaxis_transform(),
                ha="center",
                va="top",
                fontsize=8,
                alpha=0.8,
            )
        grid[-1, 0].set_xlabel("update")
        longest = max(len(series) for arm in arms for series in arm.losses)
        grid[-1, 0].set_xlim(0, max(longest, *(last for _, last in windows), 1))

    return make_plot(caption, alt, draw_on, (4.9, 4.6) if differences else (3.6, 3.4))


def grokking(caption: str, alt: str, panels: Sequence[AccuracyPanel]) -> Plot:
    """Accuracy over updates on a log axis: held out solid, train dashed, grok step marked."""

    def draw_on(figure: Figure, style: Style) -> None:
        grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False)
        for axes, panel in zip(grid[:, 0], panels, strict=True):
            _accuracies(axes, panel, style)
            if panel.title:
                axes.set_title(label(panel.title, 40), fontsize=10, loc="left")
        draw_legend(grid[0, 0], style, extra=True)
        grid[-1, 0].set_xlabel("update (log scale)")

    count = len(panels)
    return make_plot(caption, alt, draw_on, (0.9 + 2.9 * count, 1.1 + 2.7 * count))


def paired_differences(caption: str, alt: str, rows: Sequence[DifferenceRow]) -> Plot:
    """A dot for the difference of each seed, a bar for the interval of the mean."""

    def draw_on(figure: Figure, style: Style) -> None:
        axes = figure.subplots()
        named: set[str] = set()
        for i, row in enumerate(rows):
            color = style.color(row.color)
            spread = np.linspace(-0.16, 0.16, len(row.values)) if len(row.values) > 1 else [0.0]
            axes.plot(row.values, i + np.asarray(spread), "o", color=color, ms=4, alpha=0.55)
            if math.isfinite(row.outer_low):
                axes.plot([row.outer_low, row.outer_high], [i, i], color=color, lw=0.9)
            if math.isfinite(row.low):
                axes.plot([row.low, row.high], [i, i], color=color, lw=2.6)
            shown = label(row.legend, 34) if row.legend not in named else ""
            named.add(row.legend)
            axes.plot([row.mean], [i], "D", color=color, ms=6, mec=style.paper, label=shown or None)
        axes.axvline(0, color=style.ink, lw=1)
        axes.set_yticks(range(len(rows)), [label(row.name, 30) for row in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("% of the control's loss")
        axes.xaxis.set_major_formatter(FuncFormatter(_signed))
        if len(named) > 1:
            draw_legend(axes, style)

    height = 1.1 + 0.36 * len(rows)
    return make_plot(caption, alt, draw_on, (height, height + 0.2))


def _loss_curves(axes: Axes, arms: Sequence[LossCurves], style: Style) -> None:
    ceiling, floor = [], []
    for arm in arms:
        color = style.color(arm.color)
        smoothed = [smooth(np.asarray(series)) for series in arm.losses]
        for series in arm.losses:
            axes.plot(*thin_extremes(np.asarray(series)), color=color, lw=0.5, alpha=0.22)
        mean = mean_over_seeds(smoothed)
        axes.plot(*thin(mean), color=color, lw=2, label=label(arm.name))
        # The high losses of the first updates would compress the rest of the plot.
        late = mean[len(mean) // 16 :]
        finite = late[np.isfinite(late)]
        if finite.size:
            ceiling.append(float(finite.max()))
            floor.append(float(finite.min()))
    if ceiling and min(floor) < max(ceiling):
        span = max(ceiling) - min(floor)
        axes.set_ylim(min(floor) - 0.08 * span, max(ceiling) + 0.05 * span)


def _difference_curves(axes: Axes, arms: Sequence[LossCurves], style: Style) -> None:
    low, high = 0.0, 0.0
    for arm in arms:
        color = style.color(arm.color)
        smoothed = [smooth(np.asarray(series)) for series in arm.losses]
        for series in smoothed:
            axes.plot(*thin(series), color=color, lw=0.8, alpha=0.4)
            late = series[len(series) // 16 :]
            finite = late[np.isfinite(late)]
            if finite.size:
                low, high = min(low, float(finite.min())), max(high, float(finite.max()))
        axes.plot(*thin(mean_over_seeds(smoothed)), color=color, lw=2)
    axes.axhline(0, color=style.ink, lw=1)
    if low < high:
        margin = 0.15 * (high - low)
        axes.set_ylim(low - margin, high + margin)


def _accuracies(axes: Axes, panel: AccuracyPanel, style: Style) -> None:
    named: set[str] = set()
    last = 10
    for run in panel.runs:
        color = style.color(run.color)
        legend = None if run.name in named else label(run.name)
        named.add(run.name)
        if run.train:
            axes.plot(*thin_log(run.train), color=color, lw=1, ls=(0, (3, 2)), alpha=0.8)
        if run.test:
            axes.plot(*thin_log(run.test), color=color, lw=2, label=legend)
        last = max([last, *(step for step, _ in (*run.train[-1:], *run.test[-1:]))])
        if run.grok is not None:
            axes.axvline(run.grok, color=color, lw=1, alpha=0.5)
            axes.plot([run.grok], [99], "o", color=color, ms=7, mec=style.paper, zorder=5)
    for i, (arm, step) in enumerate(_marked(panel.runs)):
        # Different heights, so that labels of neighbours do not overlap.
        axes.annotate(
            f" {step:,} ",
            (step, 6 + 11 * (i % 6)),
            color=style.paper,
            fontsize=9,
            fontweight="bold",
            ha="center",
            va="center",
            bbox={
                "boxstyle": "round,pad=0.2",
                "facecolor": style.color(arm),
                "edgecolor": "none",
            },
        )
    axes.axhline(99, color=style.ink, lw=0.8, ls=(0, (1, 2)))
    axes.set_xscale("log")
    axes.set_xlim(min(10, last / 2), last * 1.05)
    roomy = style.wide or last < 1000
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if roomy else (1, 3)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}"))
    axes.yaxis.set_major_locator(FixedLocator([0, 25, 50, 75, 99]))
    axes.set_ylim(-3, 103)
    axes.set_ylabel("accuracy, %")


def _marked(runs: Sequence[AccuracyCurve]) -> list[tuple[int, int]]:
    """The grok steps that get a label, with their colours: all, or with many the arms' medians."""
    groks: dict[tuple[str, int], list[int]] = {}
    for run in runs:
        if run.grok is not None:
            groks.setdefault((run.name, run.color), []).append(run.grok)
    if sum(map(len, groks.values())) > MANY:
        groks = {arm: [sorted(steps)[(len(steps) - 1) // 2]] for arm, steps in groks.items()}
    return [(color, step) for (_, color), steps in groks.items() for step in steps]


def draw_legend(axes: Axes, style: Style, extra: bool = False) -> None:
    """A legend above the axes, in as many columns as fit."""
    handles, labels = axes.get_legend_handles_labels()
    if extra:
        for dashes, text in (("-", "held out"), ((0, (3, 2)), "training")):
            (line,) = axes.plot([], [], color=style.ink, lw=1.4, ls=dashes)
            handles.append(line)
            labels.append(text)
    widest = max((len(text) for text in labels), default=0) + 6
    room = 98 if style.wide else 38  # letters per line
    columns = len(labels) if sum(len(text) + 6 for text in labels) < room else room // widest
    axes.legend(
        handles,
        labels,
        loc="lower left",
        bbox_to_anchor=(0, 1.02 if not extra else 1.08),
        ncols=max(1, columns),
        borderaxespad=0,
        handlelength=1.6,
        columnspacing=1.4,
    )


def _signed(value: float, _: object) -> str:
    return f"{value:+.3g}".replace("-", "−") if abs(value) > 1e-12 else "0"
