"""MuonEq: rows and columns of the source equilibrated before the polar factor."""

from torch import Tensor

from gomuon.functional.polar_factor import polar
from gomuon.geometry.base import Geometry
from gomuon.optimizer import MatrixOptimizer
from gomuon.parameters.stacks import Stack
from gomuon.recipes.recipe import OfficialCode, Recipe
from gomuon.recipes.registry import register
from gomuon.recipes.stations import MUON, Group, heavy_ball_momentum, rate, rms_scale
from gomuon.recipes.work import StepWork, plain_polar_work
from gomuon.settings import Setting, one_of, with_defaults


def equilibrated_polar(X: Tensor, stack: Stack, group: Group) -> Tensor:
    """D = polar(diag(r)^(−½) X diag(c)^(−½)), r and c squared norms of X's rows and columns.

    With "row" only r, with "col" only c.
    """
    Z = X
    for side in group["equilibrate"].split("_"):
        Z = Z * (X.square().sum(-1 if side == "row" else -2, keepdim=True) + 1e-8).rsqrt()
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
        "equilibrate": Setting("row", one_of("row", "col", "row_col")),
    },
    formula="D = polar(diag(r)^−½ M̂), r the squared row norms of M̂",
    origin="MaeChd/muon-eq, with the exact polar",
    official=(
        OfficialCode(
            "MaeChd/muon-eq, llm-opt-baseline-npu/llama2_pretrain/optimizers/muon_variants/"
            "muoneq.py",
            commit="99b6c8b8f6d8b7d3424e85606d76302a71a8ea79",
        ),
    ),
    work=StepWork(plain_polar_work),
)


@register
class MuonEq(MatrixOptimizer):
    """MuonEq: rows and/or columns of the source equilibrated before the polar factor.

    `equilibrate` is "row", "col" or "row_col".
    """

    recipe = RECIPE
