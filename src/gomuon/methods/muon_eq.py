"""MuonEq: rows and columns of the source equilibrated before the polar factor."""

from torch import Tensor

from gomuon.functional.polar_factor import polar
from gomuon.geometry.base import Geometry
from gomuon.optimizer import MatrixOptimizer
from gomuon.parameters.stacks import Stack
from gomuon.recipes.recipe import Recipe
from gomuon.recipes.registry import register
from gomuon.recipes.stations import MUON, Group, heavy_ball_momentum, rate, rms_scale
from gomuon.recipes.work import StepWork, plain_polar_work
from gomuon.settings import Setting, one_of, with_defaults


def equilibrated_polar(X: Tensor, stack: Stack, group: Group) -> Tensor:
    """D = polar(diag(r)^(−½) X [diag(c)^(−½)]), r and c squared norms of X's rows and columns."""
    Z = X * (X.square().sum(-1, keepdim=True) + 1e-8).rsqrt()
    if group["equilibrate"] == "row_col":
        Z = Z * (X.square().sum(-2, keepdim=True) + 1e-8).rsqrt()
    return polar(Z, group["polar"])


RECIPE = Recipe(
    "MuonEq",
    geometry=Geometry(),
    source=heavy_ball_momentum,
    direction=equilibrated_polar,
    scale=rms_scale,
    settings={
        **rate(1e-3),
        **with_defaults(MUON, weight_decay=0.1),
        "equilibrate": Setting("row", one_of("row", "row_col")),
    },
    formula="D = polar(diag(r)^−½ M̂), r the squared row norms of M̂",
    origin="MaeChd/muon-eq",
    work=StepWork(plain_polar_work),
)


@register
class MuonEq(MatrixOptimizer):
    """MuonEq: rows (and columns) of the source equilibrated before the polar factor."""

    recipe = RECIPE
