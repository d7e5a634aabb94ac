"""The picture of docs/choosing.md: what a sweep measured at each rate, from results/tune-*."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from gomuon.lab.report.svg import Style

SWEEPS = {"tune-ptb": "Penn Treebank", "tune-shakespeare": "Tiny Shakespeare"}
METHODS = {"go-muon": "Go-MUON", "muon": "Muon", "adamw": "AdamW"}
LINES: Mapping[float | None, Any] = {0.8: "-", 0.95: (0, (4, 2)), None: "-"}


def courses(selection: Mapping[str, Any], method: str) -> dict[float | None, list[Any]]:
    """Momentum -> [(rate, statistic)], by rate; candidates that diverged are left out."""
    found: dict[float | None, list[Any]] = {}
    for one in selection["methods"][method]["candidates"]:
        if not one["diverged"]:
            found.setdefault(one["momentum"], []).append((one["rate"], one["statistic"]))
    return {momentum: sorted(points) for momentum, points in found.items()}


def draw_rates(results: Path, figure: Figure, style: Style) -> None:
    """One panel for each sweep on a text."""
    grid = figure.subplots(len(SWEEPS), 1, sharex=True)
    for axes, (folder, title) in zip(grid, SWEEPS.items(), strict=True):
        selection = json.loads((results / folder / "selection.json").read_text(encoding="utf-8"))
        _panel(axes, selection, style)
        axes.set_title(title, fontsize=10, loc="left")
    grid[-1].set_xlabel("rate (log scale)", fontsize=9)
    figure.legend(
        *grid[0].get_legend_handles_labels(), fontsize=8, loc="outside lower center", ncols=2
    )


def _panel(axes: Axes, selection: Mapping[str, Any], style: Style) -> None:
    for number, (method, name) in enumerate(METHODS.items()):
        for momentum, points in courses(selection, method).items():
            said = name if momentum is None else f"{name}, momentum {momentum:g}"
            axes.plot(
                *zip(*points, strict=True),
                color=style.color(number),
                ls=LINES[momentum],
                marker="o",
                ms=3,
                lw=1.4,
                label=said,
            )
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda rate, _: f"{rate:g}"))
    axes.set_ylabel(f"training loss, {selection['steps']} updates", fontsize=9)
    axes.tick_params(labelsize=8)
