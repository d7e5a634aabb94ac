"""NorMuon: the polar factor with its rows divided by the root of their average square."""

from typing import ClassVar

import torch
from torch import Tensor

from gomuon.functional.polar_factor import polar
from gomuon.geometry.base import Geometry
from gomuon.optimizer import MatrixOptimizer
from gomuon.parameters.stacks import Stack
from gomuon.parameters.state import Entries, Side
from gomuon.recipes.recipe import OfficialCode, Recipe
from gomuon.recipes.registry import register
from gomuon.recipes.stations import MUON, Group, length, lerp_momentum, muon_scale, rate
from gomuon.recipes.work import Kept, Matrices, StepWork, momentum, plain_polar_work
from gomuon.settings import DECAY, Setting


class NeuronSquares(Geometry):
    """Nothing before the polar factor; after it an average square for every row, a neuron's."""

    entries: ClassVar[Entries] = {
        "left_square": Side(0, form="diagonal", numbers="not negative", wide=True)
    }


def neuron_normalised_polar(X: Tensor, stack: Stack, group: Group) -> Tensor:
    """D = O/(√v + 1e-10) at the length of O = polar(X); v averages the mean square of O's rows."""
    O = polar(X, group["polar"])
    square = O.square().mean(-1, keepdim=True)
    v = stack.factor("left_square", start=torch.zeros_like(square))
    stack.remember(v, v.lerp(square, 1 - group["square_decay"]))
    D = O / (v.sqrt() + 1e-10)
    return D * (length(O) / (length(D) + 1e-10))


def _kept(x: Matrices, group: Group) -> Kept:
    """Momentum, and a number for every row."""
    return {**momentum(x, group), "left_square": x.count * x.m}


RECIPE = Recipe(
    "NorMuon",
    geometry=NeuronSquares(),
    source=lerp_momentum,
    direction=neuron_normalised_polar,
    scale=muon_scale,
    settings={**rate(0.02), **MUON, "square_decay": Setting(0.95, DECAY)},
    formula="D = O/(√v + 1e-10) at O's length, O = polar(M̂), v the average mean square of O's rows",
    origin="Li et al. 2025 (arXiv 2510.05491), zichongli5/NorMuon",
    official=(
        OfficialCode("zichongli5/NorMuon, normuon.py", "e5aaaf42fac9f466b973d6cad3dea033cdf4e370"),
    ),
    departures=(
        "A neuron of a convolution is a row of its matrix, as the paper says; the code averages "
        "over the last side of the kernel alone.",
    ),
    work=StepWork(plain_polar_work, keeps=_kept),
)


@register
class NorMuon(MatrixOptimizer):
    """NorMuon: Muon with a second moment for every neuron, after the polar factor.

    Rows of the polar factor are divided by the root of their average square, and the length stays
    that of the polar factor. `square_decay` is the decay of this average.
    """

    recipe = RECIPE
