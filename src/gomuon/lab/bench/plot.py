"""The plot of a benchmark: a row per optimizer, a column per model, and the growth below."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import (
    FixedLocator,
    FuncFormatter,
    LogLocator,
    MaxNLocator,
    NullLocator,
)

from gomuon.lab.bench.bench_tables import against_passes, number
from gomuon.lab.files import write_text
from gomuon.lab.report.svg import Style, label, render_svg

NAME = "bench"
OURS = "gomuon"


def write(result: Mapping[str, Any], folder: Path) -> None:
    """Write bench.svg and bench-dark.svg, for light and dark pages."""
    works = {n: w for n, w in result["workloads"].items() if _measured(w)}
    lines: list[Callable[[Axes, Style], None]] = [
        *(partial(_tokens, found) for found in result["tokens"].values()),
        *(partial(_growth, axis, found) for axis, found in result["scaling"].items()),
    ]
    if not works and not lines:
        return
    names = _arms(works)

    def draw_on(figure: Figure, style: Style) -> None:
        heights = ([0.55 + 0.24 * len(names)] if works else []) + ([2.4] if lines else [])
        rows = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
        if works:
            grid = rows[0].subplots(1, len(works), sharey=True, squeeze=False)[0]
            for axes, (key, work) in zip(grid, works.items(), strict=True):
                _times(axes, key, work, names, style)
                axes.set_xlim(_decades(works, names))
                axes.xaxis.set_major_locator(LogLocator(numticks=5 if len(works) < 6 else 3))
            rows[0].supxlabel("times forward + backward", fontsize=8)
            rows[0].legend(*grid[0].get_legend_handles_labels(), loc="outside upper left", ncols=2)
        if lines:
            grid = rows[-1].subplots(1, len(lines), squeeze=False)[0]
            for axes, draw in zip(grid, lines, strict=True):
                draw(axes, style)

    height = 1.1 + 0.26 * len(names) + (2.6 if lines else 0)
    for ending, dark in (("", False), ("-dark", True)):
        write_text(
            folder / f"{NAME}{ending}.svg", render_svg(draw_on, Style(wide=True, dark=dark), height)
        )


def _measured(work: Mapping[str, Any]) -> bool:
    return any(against_passes(work, arm, "step") is not None for arm in work["arms"])


def _arms(works: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Title and package of the arms, in order of appearance.

    If there are several models, only arms that were measured on more than one: on one model every
    method has several, and the page has them in its tables.
    """
    measured = [
        (name, (entry["title"], entry["package"]))
        for work in works.values()
        for name, entry in work["arms"].items()
        if "step" in entry
    ]
    often = Counter(name for name, _ in measured)
    least = min(2, max(often.values(), default=0))
    return {name: facts for name, facts in measured if often[name] >= least}


def _decades(works: Mapping[str, Any], names: Iterable[str]) -> tuple[float, float]:
    """The same axis for all models: whole powers of ten around everything drawn."""
    found = [
        against_passes(work, name, quantity)
        for work in works.values()
        for name in names
        for quantity in ("step", "whole")
    ]
    logs = [math.log10(value[0]) for value in found if value is not None and value[0] > 0]
    return 10.0 ** math.floor(min(logs)), 10.0 ** math.ceil(max(logs))


def _times(
    axes: Axes,
    title: str,
    work: Mapping[str, Any],
    names: Mapping[str, tuple[str, str]],
    style: Style,
) -> None:
    """The step as a full dot, the whole step as a ring, on one logarithmic axis."""
    for row, (name, (_, package)) in enumerate(names.items()):
        color = style.color(0 if package == OURS else 1)
        for quantity, shown, fill in (
            ("whole", "whole step", "none"),
            ("step", "optimizer step", color),
        ):
            found = against_passes(work, name, quantity)
            if found is None or found[0] <= 0:
                continue
            axes.errorbar(
                found[0],
                row,
                xerr=found[1],
                fmt="o",
                ms=5,
                color=color,
                mec=color,
                mfc=fill,
                label=shown if row == 0 else None,
            )
    axes.axvline(1, color=style.ink, lw=0.8)
    axes.set_xscale("log")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.set_yticks(range(len(names)), [label(shown, 50) for shown, _ in names.values()])
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(labelsize=7)
    axes.set_title(label(title, 20), fontsize=9, loc="left")


def _tokens(found: Mapping[str, Any], axes: Axes, style: Style) -> None:
    """Whole steps over forward and backward, by tokens per step."""
    drawn = [entry for entry in found["arms"].values() if "whole" in entry]
    for index, entry in enumerate(drawn):
        color, shown = style.color(index), label(entry["title"])
        axes.plot(found["sizes"], entry["whole"], "o-", ms=4, color=color, label=shown)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    _sizes(axes, found["sizes"], "tokens per step")
    axes.set_title("whole step over forward + backward", fontsize=9, loc="left")
    axes.legend(fontsize=7)


def _growth(axis: str, found: Mapping[str, Any], axes: Axes, style: Style) -> None:
    sizes = found["sizes"]
    drawn = [entry for entry in found["arms"].values() if "step" in entry]
    highest = [1.0]
    for index, entry in enumerate(drawn):
        first = entry["step"][0]
        factors = [seconds / first for seconds in entry["step"]]
        highest += factors
        shown = f"{label(entry['title'])}: {entry['exponent']:.2f}"
        axes.plot(sizes, factors, "o-", ms=4, color=style.color(index), label=shown)
    axes.set_yscale("log")
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(MaxNLocator(5) if max(highest) < 10 else LogLocator(numticks=5))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"×{number(y)}"))
    _sizes(axes, sizes, axis)
    axes.set_title(f"step over {axis} {sizes[0]}; exponent", fontsize=9, loc="left")
    axes.legend(fontsize=7)


def _sizes(axes: Axes, sizes: Sequence[int], name: str) -> None:
    """A logarithmic axis with these sizes as its ticks."""
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(sizes))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.tick_params(labelsize=7)
    axes.set_xlabel(name, fontsize=8)
