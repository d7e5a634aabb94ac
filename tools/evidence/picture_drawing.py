"""Draw the pictures with matplotlib, light and dark, readable at a width of 400 pixels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from gomuon.lab import files
from gomuon.lab.experiments.catalogue import EXPERIMENTS
from gomuon.lab.report.svg import Style, label, render_svg
from tools.evidence import picture_data
from tools.evidence.studies import Evidence

SETTLED = 100  # the axis ignores the first updates, whose large losses would flatten the rest
WHOLE = 100.1  # per cent; above 100, so that a run with nothing wrong has a place on the log scale

Array = npt.NDArray[np.float64]
Drawer = Callable[[Figure, Style], None]
Panel = TypeVar("Panel")


def draw_all(evidence: Evidence) -> dict[str, str]:
    """File name -> SVG, of every picture the evidence allows."""
    found: dict[str, str] = {}
    for name, (drawer, height) in _drawers(evidence).items():
        for ending, dark in (("", False), ("-dark", True)):
            found[f"{name}{ending}.svg"] = render_svg(drawer, Style(wide=False, dark=dark), height)
    return found


def write_pictures(evidence: Evidence, folder: Path) -> list[str]:
    """Write the pictures and remove those whose campaigns are gone; returns the names written."""
    drawn = draw_all(evidence)
    if drawn:
        files.make_folder(folder)
    for name, svg in drawn.items():
        _write(folder / name, svg)
    for name in picture_data.NAMES:
        for ending in ("", "-dark"):
            if f"{name}{ending}.svg" not in drawn:
                (folder / f"{name}{ending}.svg").unlink(missing_ok=True)
    return list(drawn)


def _write(path: Path, svg: str) -> None:
    files.write_atomically(path, lambda part: part.write_text(svg, encoding="utf-8"))


def _drawers(evidence: Evidence) -> dict[str, tuple[Drawer, float]]:
    found: dict[str, tuple[Drawer, float]] = {}
    if panels := picture_data.loss_panels(evidence):
        found["trajectories"] = (_stacked(panels, _losses, "update"), 0.5 + 2.2 * len(panels))
    if accuracies := picture_data.accuracy_panels(evidence):
        found["grokking"] = (
            _stacked(accuracies, _accuracies, "update (log scale)"),
            0.5 + 2.2 * len(accuracies),
        )
    if rankings := picture_data.ranking_panels(evidence):
        rows = sum(len(panel.rows) for panel in rankings)
        found["comparison"] = (_comparison(rankings), 0.65 * len(rankings) + 0.16 * rows)
    return found


def _stacked(
    panels: Sequence[Panel], draw_panel: Callable[[Axes, Panel, Style], None], below: str
) -> Drawer:
    """Panels above each other that share one axis of updates."""

    def draw_figure(figure: Figure, style: Style) -> None:
        grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        for axes, panel in zip(grid, panels, strict=True):
            draw_panel(axes, panel, style)
        grid[-1].set_xlabel(below)

    return draw_figure


def _losses(axes: Axes, panel: picture_data.LossPanel, style: Style) -> None:
    settled = [0.0]
    for comparison in panel.comparisons:
        color = style.color(comparison.color)
        for line in comparison.lines:
            axes.plot(*zip(*line, strict=True), color=color, lw=0.7, alpha=0.45)
            settled += [y for x, y in line if x >= SETTLED]
        axes.plot(
            *zip(*comparison.mean, strict=True), color=color, lw=2, label=label(comparison.name, 40)
        )
        if comparison.paper:
            axes.plot(
                *zip(*comparison.paper, strict=True),
                "D",
                color=style.paper,
                mec=color,
                ms=6,
                mew=1.6,
            )
            settled += [y for _, y in comparison.paper]
    if any(comparison.paper for comparison in panel.comparisons):
        axes.plot([], [], "D", color=style.paper, mec=style.ink, ms=6, mew=1.6, label="the paper's")
    low, high = min(settled), max(settled)
    span = (high - low) or 1.0
    entries = len(axes.get_legend_handles_labels()[1])
    # Room for the legend at the bottom of the panel.
    axes.set_ylim(low - (0.1 + 0.15 * entries) * span, high + 0.1 * span)
    axes.set_xlim(0, max(x for comparison in panel.comparisons for x, _ in comparison.mean))
    for first, last in EXPERIMENTS["ptb"].windows:
        axes.axvspan(first, last, color=style.ink, alpha=0.07, linewidth=0)
    axes.axhline(0, color=style.ink, lw=1)
    axes.yaxis.set_major_formatter(FuncFormatter(_signed))
    axes.set_ylabel("Go-MUON's loss,\n% over its control's", fontsize=9)
    axes.set_title(label(panel.title, 40), fontsize=10, loc="left")
    axes.legend(fontsize=8, loc="lower left", handlelength=1.4, borderaxespad=0.2)
    axes.tick_params(labelsize=8)


def _accuracies(axes: Axes, panel: picture_data.GrokkingPanel, style: Style) -> None:
    last = 10.0
    for line in sorted(panel.lines, key=lambda line: line.main):
        color = style.color(line.color)
        look = {"lw": 2.0} if line.main else {"lw": 0.9, "alpha": 0.6, "ls": (0, (3, 2))}
        axes.plot(*zip(*line.points, strict=True), color=color, label=label(line.name), **look)
        last = max(last, line.points[-1][0])
        if line.main and line.grok is not None:
            axes.plot([line.grok], [99], "o", color=color, ms=6, mec=style.paper, zorder=5)
        if line.paper is not None:
            axes.axvline(line.paper, color=color, lw=1.2, ls=(0, (1, 1.5)))
    if any(line.paper is not None for line in panel.lines):
        axes.plot([], [], color=style.ink, lw=1.2, ls=(0, (1, 1.5)), label="the paper's")
    axes.set_xscale("log")
    axes.set_xlim(10, last * 1.05)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}"))
    # The share still wrong, on a log scale: the last few per cent matter most.
    axes.set_yscale("function", functions=(_stretch, _unstretch))
    axes.yaxis.set_major_locator(FixedLocator([0, 50, 90, 97, 99, 100]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:.0f}"))
    axes.set_ylim(-700, 100)  # room for the legend below zero
    axes.axhline(99, color=style.ink, lw=1)
    axes.set_ylabel("held-out accuracy, %,\nstretched at the top", fontsize=9)
    axes.set_title(label(panel.title, 40), fontsize=10, loc="left")
    axes.legend(fontsize=7.5, loc="lower right", ncols=2, handlelength=1.6, borderaxespad=0.2)
    axes.tick_params(labelsize=8)


def _stretch(accuracy: Array) -> Array:
    return -np.log10(np.maximum(WHOLE - accuracy, 1e-3))


def _unstretch(height: Array) -> Array:
    return WHOLE - 10.0**-height


def _comparison(panels: tuple[picture_data.RankingPanel, ...]) -> Drawer:
    def draw_figure(figure: Figure, style: Style) -> None:
        ratios = [len(panel.rows) + 1.5 for panel in panels]
        grid = figure.subplots(
            len(panels), 1, squeeze=False, gridspec_kw={"height_ratios": ratios}
        )[:, 0]
        for axes, panel in zip(grid, panels, strict=True):
            _ranking(axes, panel, style)

    return draw_figure


def _ranking(axes: Axes, panel: picture_data.RankingPanel, style: Style) -> None:
    """A ring per seed and a diamond for the mean; Go-MUON has its own colour."""
    limit = picture_data.axis_end(panel)
    for i, row in enumerate(panel.rows):
        color = style.color(0 if row.name.startswith("Go-MUON") else 1)
        words = row.remark if row.mean is None else ""
        if row.mean is not None and row.mean > limit:
            words = f"{row.mean:+.0f} % →"
        else:
            spread = np.linspace(-0.18, 0.18, len(row.values)) if len(row.values) > 1 else [0.0]
            for value, shift in zip(row.values, spread, strict=True):
                if value is not None:
                    axes.plot([value], [i + shift], "o", color=color, ms=3.5, mfc="none", alpha=0.8)
            if row.mean is not None:
                axes.plot([row.mean], [i], "D", color=color, ms=5, mec=style.paper)
        axes.annotate(
            words,
            (0.99, i),
            xycoords=("axes fraction", "data"),
            ha="right",
            va="center",
            fontsize=7.5,
            color=style.ink,
        )
    axes.set_yticks(range(len(panel.rows)), [label(row.name, 24) for row in panel.rows])
    axes.set_ylim(len(panel.rows) - 0.4, -0.6)
    axes.set_xlim(-0.04 * limit, 1.04 * limit)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(panel.axis, fontsize=9)
    axes.set_title(label(panel.title, 40), fontsize=10, loc="left")
    axes.tick_params(labelsize=8)


def _signed(value: float, _: object) -> str:
    return f"{value:+.3g}".replace("-", "−") if abs(value) > 1e-12 else "0"
