"""The pictures of docs/how-it-works.md, from one real step."""

import math

import numpy as np
import numpy.typing as npt
import torch
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from torch import Tensor

from gomuon.functional import weighted_norm
from gomuon.lab.report.svg import Style
from tools.site.real_step import RealStep

Array = npt.NDArray[np.float64]
ANGLES = 720


def draw_factors(step: RealStep, figure: Figure, style: Style) -> None:
    """A and B̄ beside the maps made of them, above the eigenvalues of each pair."""
    backward, forward = step.factors
    grid = figure.subplots(3, 2)
    sides = (("A", forward, "P_A", step.right), ("B̄", backward, "P_B", step.left))
    for column, (name, factor, map_name, the_map) in enumerate(sides):
        _matrix(grid[0][column], factor, name, style)
        _matrix(grid[1][column], the_map, f"{map_name} = {name} to the power −¼", style)
        axes = grid[2][column]
        for number, (matrix, what) in enumerate(((factor, name), (the_map, map_name))):
            values = torch.linalg.eigvalsh(matrix).flip(0)
            places = range(1, len(values) + 1)
            axes.plot(places, (values / values[0]).numpy(), color=style.color(number), label=what)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_title("eigenvalues over the largest", fontsize=7, loc="left")
        axes.legend(fontsize=7, handlelength=1)
        axes.tick_params(labelsize=6)


def draw_stations(step: RealStep, figure: Figure, style: Style) -> None:
    """M̂, C, polar(C) and D, each above its singular values."""
    grid = figure.subplots(4, 2, gridspec_kw={"height_ratios": [1.25, 0.75, 1.25, 0.75]})
    stations = (
        ("1. source M̂", step.source),
        ("2. mapped C = P_B M̂ P_A", step.mapped),
        ("3. levelled polar(C)", step.levelled),
        ("4. mapped back D", step.direction),
    )
    for number, (name, matrix) in enumerate(stations):
        block, column = divmod(number, 2)
        _matrix(grid[2 * block][column], matrix, name, style)
        axes = grid[2 * block + 1][column]
        values = torch.linalg.svdvals(matrix).numpy()
        axes.bar(range(1, len(values) + 1), values, color=style.color(0), width=0.7)
        axes.set_title("singular values", fontsize=7, loc="left")
        axes.tick_params(labelsize=6)
        axes.grid(visible=False, axis="x")


def draw_balls(step: RealStep, figure: Figure, style: Style) -> None:
    """Both unit balls and their highest points, in the plane through both directions."""
    plane = _plane(step)
    axes = figure.subplots()
    both = (
        ("Go-MUON", step.direction, (step.left, step.right), 0),
        ("Muon", step.muon, (None, None), 1),
    )
    for name, direction, maps, number in both:
        color = style.color(number)
        outline = _outline(plane, direction, *maps)
        axes.fill(outline[:, 0], outline[:, 1], color=color, alpha=0.1, lw=0)
        axes.plot(outline[:, 0], outline[:, 1], color=color, lw=1.6, label=f"{name}'s ball")
        across, up = _place(plane, direction)
        axes.plot([0, across], [0, up], color=color, lw=1.2, ls=(0, (4, 2)))
        axes.plot([across], [up], "o", color=color, ms=7, mec=style.paper, label=f"{name}'s step")
        axes.axhline(up, color=color, lw=0.8, alpha=0.7)
    turn = np.linspace(0, 2 * math.pi, 200)
    radius = math.sqrt(min(step.source.shape))
    axes.plot(radius * np.cos(turn), radius * np.sin(turn), color=style.ink, lw=0.8, ls=":")
    axes.set_aspect("equal")
    reach = 1.45 * radius
    axes.set_xlim(-reach, reach)
    axes.set_ylim(-reach, reach)
    axes.set_ylabel("along the source M̂ →", fontsize=9)
    axes.set_xlabel("across it", fontsize=9)
    axes.tick_params(labelsize=7)
    figure.legend(
        *axes.get_legend_handles_labels(), fontsize=8, loc="outside lower center", ncols=2
    )


def _matrix(axes: Axes, matrix: Tensor, title: str, style: Style) -> None:
    """Blue is negative, red positive; the strongest colour is the largest entry."""
    values = matrix.numpy()
    limit = float(np.abs(values).max())
    low, high = style.color(0), style.color(1)
    axes.pcolormesh(
        values[::-1],
        cmap=_colours(low, style.paper, high),
        vmin=-limit,
        vmax=limit,
        rasterized=True,
    )
    axes.set_aspect("equal")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.grid(visible=False)
    axes.set_title(title, fontsize=8, loc="left")


def _colours(low: str, middle: str, high: str) -> Colormap:
    return LinearSegmentedColormap.from_list("both sides of zero", [low, middle, high])


def _plane(step: RealStep) -> tuple[Tensor, Tensor]:
    """Orthonormal: across and up, in the span of both directions; up is where ⟨M̂, ·⟩ grows."""
    first = step.muon / step.muon.norm()
    rest = step.direction - (step.direction * first).sum() * first
    second = rest / rest.norm()
    along = torch.stack([(step.source * first).sum(), (step.source * second).sum()])
    along = along / along.norm()
    up = along[0] * first + along[1] * second
    across = along[1] * first - along[0] * second
    return across, up


def _place(plane: tuple[Tensor, Tensor], X: Tensor) -> tuple[float, float]:
    return float((plane[0] * X).sum()), float((plane[1] * X).sum())


def _outline(
    plane: tuple[Tensor, Tensor], direction: Tensor, left: Tensor | None, right: Tensor | None
) -> Array:
    """Where the plane cuts the ball {X : q_P(X) ≤ q_P(direction)}."""
    turn = torch.linspace(0, 2 * math.pi, ANGLES, dtype=direction.dtype)
    across, up = torch.cos(turn), torch.sin(turn)
    X = across[:, None, None] * plane[0] + up[:, None, None] * plane[1]
    length = weighted_norm(direction, left, right) / weighted_norm(X, left, right)
    return torch.stack([length * across, length * up], dim=1).numpy()
