"""The picture of the mismatch and of the four parts of the error."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from gomuon.lab import files
from gomuon.lab.report.svg import Style, render_svg
from tools.evidence.softmax_courses import averaged
from tools.softmax_story import LAYERS, OBSERVED, PARTS, SAMPLED, Course

NAME = "softmax"
HEIGHT = 8.2
DRAWN = LAYERS[0]  # the layer whose parts are drawn
LEGEND: dict[str, Any] = {"fontsize": 7.5, "handlelength": 1.4, "borderaxespad": 0.2}
WORDS = {OBSERVED: "observed labels", SAMPLED: "labels drawn from the model"}


def write_picture(courses: Sequence[Course], folder: Path) -> list[str]:
    """Write the picture, or remove it if there are no courses; returns the names written."""
    names = [f"{NAME}.svg", f"{NAME}-dark.svg"]
    if not courses:
        for name in names:
            (folder / name).unlink(missing_ok=True)
        return []
    files.make_folder(folder)
    for name, dark in zip(names, (False, True), strict=True):
        _write(folder / name, drawn(courses, dark=dark))
    return names


def _write(path: Path, svg: str) -> None:
    files.write_atomically(path, lambda part: part.write_text(svg, encoding="utf-8"))


def drawn(courses: Sequence[Course], *, dark: bool) -> str:
    """The picture as SVG."""

    def draw(figure: Figure, style: Style) -> None:
        above, *below = figure.subplots(3, 1, sharex=True)
        _bounds(above, courses, style)
        for axes, labels in zip(below, (OBSERVED, SAMPLED), strict=True):
            _parts(axes, courses, labels, style)
        top = max(axes.get_ylim()[1] for axes in below)
        for axes in below:
            axes.set_ylim(0, top)
        below[-1].set_xlabel("update")

    return render_svg(draw, Style(wide=False, dark=dark), HEIGHT)


def _bounds(axes: Axes, courses: Sequence[Course], style: Style) -> None:
    for index, layer in enumerate(LAYERS):
        mean, color = averaged(courses, (OBSERVED, layer)), style.color(index)
        axes.plot(mean.steps, mean.mismatch, color=color, lw=1.8, label=layer)
        axes.plot(mean.steps, mean.bound, color=color, lw=1.2, ls=(0, (4, 2)), label="its bound")
    axes.set_yscale("log")
    axes.set_ylim(bottom=axes.get_ylim()[0] / 12)  # room for the legend
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    _finish(axes, "‖B_q − B_F‖ and its bound,\nobserved labels")
    axes.legend(**LEGEND, loc="lower left", ncols=2)


def _parts(axes: Axes, courses: Sequence[Course], labels: str, style: Style) -> None:
    mean = averaged(courses, (labels, DRAWN))
    colors = [style.color(index) for index in (0, 1, 4, 2)]
    axes.stackplot(mean.steps, *mean.parts, colors=colors, labels=PARTS, alpha=0.75, lw=0)
    axes.plot(mean.steps, mean.error, color=style.ink, lw=1.6, label="the error itself")
    _finish(axes, f"Parts of the error, {DRAWN} layer,\n{WORDS[labels]}")
    if labels == OBSERVED:  # the colours are the same below
        axes.legend(**LEGEND, loc="upper right")


def _finish(axes: Axes, title: str) -> None:
    axes.set_title(title, fontsize=10, loc="left")
    axes.margins(x=0)
    axes.tick_params(labelsize=8)
