"""Muon+: the polar factor with its columns and rows normalised."""

from torch import Tensor

from gomuon.functional.polar_factor import polar
from gomuon.geometry.base import Geometry
from gomuon.optimizer import MatrixOptimizer
from gomuon.parameters.stacks import Stack
from gomuon.recipes.recipe import OfficialCode, Recipe
from gomuon.recipes.registry import register
from gomuon.recipes.stations import (
    MUON,
    Group,
    heavy_ball_momentum,
    measured_rms_scale,
    rate,
    ratio_scale,
)
from gomuon.recipes.work import StepWork, plain_polar_work
from gomuon.settings import Setting, one_of, with_defaults


def normalised_polar(X: Tensor, stack: Stack, group: Group) -> Tensor:
    """D = polar(X), then columns and/or rows divided by √(Σu² + 1e-7)."""
    D = polar(X, group["polar"])
    for side in () if group["normalise"] == "none" else group["normalise"].split("_"):
        D = D * (D.square().sum(-1 if side == "row" else -2, keepdim=True) + 1e-7).rsqrt()
    return D


RECIPE = Recipe(
    "MuonPlus",
    geometry=Geometry(),
    source=heavy_ball_momentum,
    direction=normalised_polar,
    scale=ratio_scale,
    rms_scale=measured_rms_scale,
    settings={
        **rate(1e-3),
        **with_defaults(MUON, weight_decay=0.1),
        "normalise": Setting("none", one_of("none", "col", "row", "col_row", "row_col")),
        "aspect": Setting("ratio", one_of("ratio", "max")),
    },
    formula="D = polar(M̂), columns and/or rows normalised",
    origin="K1seki221/MuonPlus, with the exact polar",
    official=(OfficialCode("K1seki221/MuonPlus, utils/optim/muon_plus.py"),),
    work=StepWork(plain_polar_work),
)


@register
class MuonPlus(MatrixOptimizer):
    """Muon+: the polar factor with its columns and/or rows normalised.

    `normalise` is "none", "col", "row", "col_row" or "row_col". As in the public code, the default
    normalises nothing; the authors' experiments use "col_row" and "row_col".
    """

    recipe = RECIPE
