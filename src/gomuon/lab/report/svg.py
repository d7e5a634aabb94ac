"""SVG plots: their colours, and one version for each kind of screen.

Each plot is drawn four times, wide and narrow, light and dark, because the text in a plot cannot be
rearranged and a white plot on a dark page is hard to look at.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from gomuon.lab.report.document import Plot, visible

matplotlib.use("Agg")  # works on machines without a screen

# Okabe and Ito's colours, which people with colour blindness can distinguish.
LIGHT = ("#0b6fb8", "#cf5300", "#00845f", "#b0518a", "#8a6d00", "#4a9fd0", "#6b6b6b")
DARK = ("#5db4f5", "#ff9354", "#3ad1a5", "#eb9fd0", "#e8c64a", "#9bd7ff", "#b5b5b5")


@dataclass(frozen=True)
class Style:
    """The size and colours of one version of a plot."""

    wide: bool
    dark: bool

    def color(self, index: int) -> str:
        palette = DARK if self.dark else LIGHT
        return palette[index % len(palette)]

    @property
    def ink(self) -> str:
        return "#d7dbe2" if self.dark else "#2a2f38"

    @property
    def faint(self) -> str:
        return "#39404d" if self.dark else "#dfe3e9"

    @property
    def paper(self) -> str:
        return "#181c23" if self.dark else "#ffffff"

    @property
    def settings(self) -> Any:
        return {
            "svg.fonttype": "path",  # the same letters on every machine
            "svg.hashsalt": "gomuon",  # the same bytes from the same numbers
            "text.parse_math": False,  # a name may contain a dollar sign
            "font.size": 10,
            "text.color": self.ink,
            "axes.labelcolor": self.ink,
            "axes.edgecolor": self.faint,
            "axes.facecolor": "none",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.axisbelow": True,
            "grid.color": self.faint,
            "grid.linewidth": 0.6,
            "xtick.color": self.ink,
            "ytick.color": self.ink,
            "legend.frameon": False,
            "lines.solid_capstyle": "round",
        }


def label(name: str, limit: int = 28) -> str:
    """A name shortened for a plot: one line of printable characters."""
    clean = " ".join(visible(name).split())
    return clean if len(clean) <= limit else clean[: limit - 1] + "…"


def render_svg(draw_on: Callable[[Figure, Style], None], style: Style, height: float) -> str:
    """One version of a plot, as SVG text."""
    size = (9.2 if style.wide else 3.7, height)
    with matplotlib.rc_context(style.settings), warnings.catch_warnings():
        # Letters that the font does not have are drawn as boxes; no warning is needed.
        warnings.filterwarnings("ignore", message="Glyph")
        figure = Figure(figsize=size, layout="constrained")
        draw_on(figure, style)
        stream = io.StringIO()
        figure.savefig(
            stream, format="svg", transparent=True, metadata={"Date": None, "Creator": None}
        )
    return _shorten(stream.getvalue())


def make_plot(
    caption: str,
    alt: str,
    draw_on: Callable[[Figure, Style], None],
    heights: tuple[float, float],
) -> Plot:
    def variant(wide: bool, dark: bool) -> str:
        return render_svg(draw_on, Style(wide, dark), heights[0 if wide else 1])

    return Plot(
        caption,
        alt,
        wide=variant(True, False),
        wide_dark=variant(True, True),
        narrow=variant(False, False),
        narrow_dark=variant(False, True),
    )


def _shorten(svg: str) -> str:
    """Round the coordinates of paths to 0.01 points, which halves the file."""
    return re.sub(
        r'( d=")([^"]*)"',
        lambda m: m[1] + re.sub(r"(\.\d\d)\d+", r"\1", m[2]).replace("\n", " ") + '"',
        svg,
    )
