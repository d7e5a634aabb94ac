"""Muon with the Polar Express iteration as it was published."""

from torch import Tensor

from gomuon.functional.polar_express import published_polar_express
from gomuon.geometry.base import Geometry
from gomuon.optimizer import MatrixOptimizer
from gomuon.parameters.stacks import Stack
from gomuon.recipes.recipe import OfficialCode, Recipe
from gomuon.recipes.registry import register
from gomuon.recipes.stations import MUON, Group, lerp_momentum, muon_scale, rate
from gomuon.recipes.work import Matrices, Product, StepWork, Work, symmetric_result_work
from gomuon.settings import INTERVAL, Setting


def polar_express(X: Tensor, stack: Stack, group: Group) -> Tensor:
    """D = some steps of Polar Express on X."""
    return published_polar_express(X, group["polar_steps"])


def _step_work(x: Matrices, group: Group) -> Work:
    """Every step: YYᵀ, its square, and the product with Y."""
    k, n = sorted((x.m, x.n))
    gram, square = symmetric_result_work(x.count, k, n), symmetric_result_work(x.count, k, k)
    return group["polar_steps"] * [*gram, *square, Product(x.count, k, k, n)]


RECIPE = Recipe(
    "PolarExpressMuon",
    geometry=Geometry(),
    source=lerp_momentum,
    direction=polar_express,
    scale=muon_scale,
    settings={
        **rate(0.02),
        **{name: setting for name, setting in MUON.items() if name != "polar"},
        "polar_steps": Setting(5, INTERVAL),
    },
    formula="D = p₅(…p₁(M̂/1.01‖M̂‖)), p the optimal quintics for singular values in [.001, 1]",
    origin="Amsel et al. 2025 (arXiv 2505.16932), NoahAmsel/PolarExpress",
    official=(
        OfficialCode(
            "NoahAmsel/PolarExpress, polar_express/basic.py",
            "7f0fb5730e3d5946f96b07404bbe476515f2caec",
            theirs="the iteration in the working precision",
        ),
    ),
    departures=("Products are in the working precision; the code casts to bfloat16.",),
    work=StepWork(_step_work),
)


@register
class PolarExpressMuon(MatrixOptimizer):
    """Muon with five steps of Polar Express, with its public code's coefficients and scalings.

    Momentum, length and rate are those of Muon as it was published, as that code is only the polar
    factor.

    After `polar_steps` steps singular values are near one where they were above a thousandth of the
    norm, and those below it grow by their first slopes: this is a rough polar factor, unlike that
    of `Muon`, whose fast form goes on to within 1 %.
    """

    recipe = RECIPE
