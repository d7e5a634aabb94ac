"""Muon²: the source divided by the root of the gradient's average square."""

from torch import Tensor

from gomuon.functional.polar_factor import polar
from gomuon.geometry.base import Geometry
from gomuon.optimizer import MatrixOptimizer
from gomuon.parameters.stacks import Stack
from gomuon.recipes.recipe import OfficialCode, OlderCheckpoints, Recipe
from gomuon.recipes.registry import register
from gomuon.recipes.stations import MUON, Group, lerp_momentum, muon_scale, rate
from gomuon.recipes.work import StepWork, momentum_and_square, plain_polar_work
from gomuon.settings import DECAY, Setting, with_defaults


def squared_polar(X: Tensor, stack: Stack, group: Group) -> Tensor:
    """D = polar(X/(√v + 1e-10)), v the average of G²."""
    v = stack.memory("square")
    stack.remember(v, v.lerp(stack.G.square(), 1 - group["square_decay"]))
    return polar(X / (v.sqrt() + 1e-10), group["polar"])


RECIPE = Recipe(
    "MuonSquared",
    geometry=Geometry(),
    source=lerp_momentum,
    direction=squared_polar,
    scale=muon_scale,
    settings={
        **rate(0.1),
        **with_defaults(MUON, weight_decay=0.0125),
        "square_decay": Setting(0.95, DECAY),
    },
    formula="D = polar(M̂/(√v + 1e-10)), v the average of G²",
    origin="KellerJordan/modded-nanogpt, track 3, after arXiv 2604.09967; exact polar",
    official=(
        OfficialCode(
            "KellerJordan/modded-nanogpt, records/track_3_optimization/results/20260501_muonsq/"
            "train_gpt_simple_muonsq.py",
            commit="c8554822ca4d99723fdbf59b790e6099ecafe8f3",
            theirs="lr and weight_decay as that script gives them, .1 and .0125",
        ),
    ),
    older=OlderCheckpoints(
        "lr_scale",
        changed=(
            "its average is of the source's squares, and goes on with the gradient's; to go on as "
            "before, train with the version that wrote it"
        ),
    ),
    work=StepWork(plain_polar_work, keeps=momentum_and_square),
)


@register
class MuonSquared(MatrixOptimizer):
    """Muon²: the source divided by √v before the polar factor, v the gradient's average square."""

    recipe = RECIPE
