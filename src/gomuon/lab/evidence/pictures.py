"""Paint the pictures, light and dark, narrow enough to be read at 400 pixels."""

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
from gomuon.lab.evidence import drawings
from gomuon.lab.evidence.reading import Evidence
from gomuon.lab.experiments.catalogue import EXPERIMENTS
from gomuon.lab.report.svg import Style, label, render_svg

SETTLED = 100  # the first updates fall from ln(vocabulary) and would flatten all that matters
WHOLE = 100.1  # per cent; a little more than all, so that none wrong has a place on a log scale

Array = npt.NDArray[np.float64]
Painter = Callable[[Figure, Style], None]
Panel = TypeVar("Panel")


def paint_all(evidence: Evidence) -> dict[str, str]:
    """File name -> SVG, of every picture the evidence allows."""
    found: dict[str, str] = {}
    for name, (painter, height) in _painters(evidence).items():
        for ending, dark in (("", False), ("-dark", True)):
            found[f"{name}{ending}.svg"] = render_svg(painter, Style(wide=False, dark=dark), height)
    return found


def write(evidence: Evidence, folder: Path) -> list[str]:
    """Write the pictures, and remove those whose evidence is gone; the names that remain."""
    painted = paint_all(evidence)
    if painted:
        files.make_folder(folder)
    for name, svg in painted.items():
        _write(folder / name, svg)
    for name in drawings.NAMES:
        for ending in ("", "-dark"):
            if f"{name}{ending}.svg" not in painted:
                (folder / f"{name}{ending}.svg").unlink(missing_ok=True)
    return list(painted)


def _write(path: Path, svg: str) -> None:
    files.write_atomically(path, lambda part: part.write_text(svg, encoding="utf-8"))


def _painters(evidence: Evidence) -> dict[str, tuple[Painter, float]]:
    found: dict[str, tuple[Painter, float]] = {}
    if panels := drawings.trajectories(evidence):
        found["trajectories"] = (_stacked(panels, _differences, "update"), 0.5 + 2.2 * len(panels))
    if groks := drawings.grokking(evidence):
        found["grokking"] = (
            _stacked(groks, _accuracies, "update (log scale)"),
            0.5 + 2.2 * len(groks),
        )
    if dots := drawings.comparison(evidence):
        rows = sum(len(panel.rows) for panel in dots)
        found["comparison"] = (_comparison(dots), 0.65 * len(dots) + 0.16 * rows)
    return found


def _stacked(
    panels: Sequence[Panel], paint_panel: Callable[[Axes, Panel, Style], None], below: str
) -> Painter:
    """Panels on top of each other over one axis of updates."""

    def paint(figure: Figure, look: Style) -> None:
        grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        for axes, panel in zip(grid, panels, strict=True):
            paint_panel(axes, panel, look)
        grid[-1].set_xlabel(below)

    return paint


def _differences(axes: Axes, panel: drawings.Panel, look: Style) -> None:
    settled = [0.0]
    for series in panel.series:
        color = look.color(series.color)
        for line in series.lines:
            axes.plot(*zip(*line, strict=True), color=color, lw=0.7, alpha=0.45)
            settled += [y for x, y in line if x >= SETTLED]
        axes.plot(*zip(*series.mean, strict=True), color=color, lw=2, label=label(series.name, 34))
        if series.paper:
            axes.plot(
                *zip(*series.paper, strict=True), "D", color=look.paper, mec=color, ms=6, mew=1.6
            )
            settled += [y for _, y in series.paper]
    if any(series.paper for series in panel.series):
        axes.plot([], [], "D", color=look.paper, mec=look.ink, ms=6, mew=1.6, label="the paper's")
    low, high = min(settled), max(settled)
    span = (high - low) or 1.0
    entries = len(axes.get_legend_handles_labels()[1])
    # The legend has the bottom of the panel to itself.
    axes.set_ylim(low - (0.1 + 0.15 * entries) * span, high + 0.1 * span)
    axes.set_xlim(0, max(x for series in panel.series for x, _ in series.mean))
    for first, last in EXPERIMENTS["ptb"].windows:
        axes.axvspan(first, last, color=look.ink, alpha=0.07, linewidth=0)
    axes.axhline(0, color=look.ink, lw=1)
    axes.yaxis.set_major_formatter(FuncFormatter(_signed))
    axes.set_ylabel("Go-MUON's loss,\n% over its control's", fontsize=9)
    axes.set_title(label(panel.title, 40), fontsize=10, loc="left")
    axes.legend(fontsize=8, loc="lower left", handlelength=1.4, borderaxespad=0.2)
    axes.tick_params(labelsize=8)


def _accuracies(axes: Axes, panel: drawings.GrokPanel, look: Style) -> None:
    last = 10.0
    for line in sorted(panel.lines, key=lambda line: line.main):
        color = look.color(line.color)
        style = {"lw": 2.0} if line.main else {"lw": 0.9, "alpha": 0.6, "ls": (0, (3, 2))}
        axes.plot(*zip(*line.points, strict=True), color=color, label=label(line.name), **style)
        last = max(last, line.points[-1][0])
        if line.main and line.grok is not None:
            axes.plot([line.grok], [99], "o", color=color, ms=6, mec=look.paper, zorder=5)
        if line.paper is not None:
            axes.axvline(line.paper, color=color, lw=1.2, ls=(0, (1, 1.5)))
    if any(line.paper is not None for line in panel.lines):
        axes.plot([], [], color=look.ink, lw=1.2, ls=(0, (1, 1.5)), label="the paper's")
    axes.set_xscale("log")
    axes.set_xlim(10, last * 1.05)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}"))
    # What is still wrong, on a log scale: all that matters happens in the last few per cent.
    axes.set_yscale("function", functions=(_stretch, _unstretch))
    axes.yaxis.set_major_locator(FixedLocator([0, 50, 90, 97, 99, 100]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:.0f}"))
    axes.set_ylim(-700, 100)  # the legend has what is below zero to itself
    axes.axhline(99, color=look.ink, lw=1)
    axes.set_ylabel("held-out accuracy, %,\nstretched at the top", fontsize=9)
    axes.set_title(label(panel.title, 40), fontsize=10, loc="left")
    axes.legend(fontsize=7.5, loc="lower right", ncols=2, handlelength=1.6, borderaxespad=0.2)
    axes.tick_params(labelsize=8)


def _stretch(accuracy: Array) -> Array:
    return -np.log10(np.maximum(WHOLE - accuracy, 1e-3))


def _unstretch(height: Array) -> Array:
    return WHOLE - 10.0**-height


def _comparison(panels: tuple[drawings.DotPanel, ...]) -> Painter:
    def paint(figure: Figure, look: Style) -> None:
        ratios = [len(panel.rows) + 1.5 for panel in panels]
        grid = figure.subplots(
            len(panels), 1, squeeze=False, gridspec_kw={"height_ratios": ratios}
        )[:, 0]
        for axes, panel in zip(grid, panels, strict=True):
            _dots(axes, panel, look)

    return paint


def _dots(axes: Axes, panel: drawings.DotPanel, look: Style) -> None:
    """A ring per seed and a diamond for the mean; Go-MUON and its variants in a colour apart."""
    limit = drawings.limit(panel)
    for i, row in enumerate(panel.rows):
        color = look.color(0 if row.name.startswith("Go-MUON") else 1)
        words = row.remark if row.mean is None else ""
        if row.mean is not None and row.mean > limit:
            words = f"{row.mean:+.0f} % →"
        else:
            spread = np.linspace(-0.18, 0.18, len(row.values)) if len(row.values) > 1 else [0.0]
            for value, shift in zip(row.values, spread, strict=True):
                if value is not None:
                    axes.plot([value], [i + shift], "o", color=color, ms=3.5, mfc="none", alpha=0.8)
            if row.mean is not None:
                axes.plot([row.mean], [i], "D", color=color, ms=5, mec=look.paper)
        axes.annotate(
            words,
            (0.99, i),
            xycoords=("axes fraction", "data"),
            ha="right",
            va="center",
            fontsize=7.5,
            color=look.ink,
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
