"""MALT: matched polar with diagonal maps from row and column norms."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from gomuon.functional.oracle import matched_direction
from gomuon.geometry.base import Geometry
from gomuon.optimizer import MatrixOptimizer
from gomuon.parameters.layers import Layer
from gomuon.parameters.stacks import Stack
from gomuon.parameters.state import Entries, both_sides
from gomuon.recipes.recipe import Recipe
from gomuon.recipes.registry import register
from gomuon.recipes.stations import MUON, Group, grafted, lerp_momentum, muon_scale, rate
from gomuon.recipes.work import Kept, Matrices, StepWork, momentum, plain_polar_work
from gomuon.settings import DECAY, EXPONENT, Setting, one_of


class RowColumnNorms(Geometry):
    """Averages of the squared norms of G's rows and columns: a diagonal pair of maps."""

    description = "row and column norms of gradients"
    entries: ClassVar[Entries] = {
        **both_sides("factor", form="diagonal", numbers="not negative"),
        **both_sides("scale", form="diagonal", numbers="not negative"),
    }

    def observe(
        self, due: Sequence[Layer], stacks: Sequence[Stack], group: Group
    ) -> Sequence[Layer]:
        gamma, alpha = group["factor_decay"], group["alpha"]
        for stack in stacks:
            square = stack.G.square()
            for side, observed in (("left", square.sum(-1, True)), ("right", square.sum(-2, True))):
                factor = stack.factor(f"{side}_factor", start=torch.zeros_like(observed))
                stack.remember(factor, factor.lerp(observed, 1 - gamma))
                largest = factor.amax(dim=(-2, -1), keepdim=True)
                floored = factor + 1e-12 * largest
                scale = torch.where(largest > 0, floored, 1.0).pow(-alpha)
                stack.set(f"{side}_scale", scale)
        return ()


def matched_polar_diagonal(X: Tensor, stack: Stack, group: Group) -> Tensor:
    """D = P_B·polar(P_B X P_A)·P_A with diagonal maps; grafted if `graft` is set."""
    left, right = stack.map("left_scale"), stack.map("right_scale")
    D, rank = matched_direction(X, left, right, polar_method=group["polar"])
    return grafted(D, rank, group)


def _kept(x: Matrices, group: Group) -> Kept:
    """Momentum, and the averages and maps of both sides, which are diagonals."""
    sides = (("left", x.m), ("right", x.n))
    diagonals = {f"{s}_{kind}": x.count * d for s, d in sides for kind in ("factor", "scale")}
    return {**momentum(x, group), **diagonals}


RECIPE = Recipe(
    "MALT",
    geometry=RowColumnNorms(),
    source=lerp_momentum,
    direction=matched_polar_diagonal,
    scale=muon_scale,
    settings={
        **rate(0.02),
        **MUON,
        "factor_decay": Setting(0.95, DECAY),
        "alpha": Setting(0.125, EXPONENT),
        "graft": Setting("frobenius", one_of("frobenius", None)),
    },
    formula=(
        "D = P_B·polar(P_B M̂ P_A)·P_A with diagonal P from averaged row and column norms, power ⅛"
    ),
    origin="arXiv 2608.05088, from a digest: no code is public, and its numbers are ours",
    work=StepWork(plain_polar_work, keeps=_kept),
)


@register
class MALT(MatrixOptimizer):
    """MALT: matched polar with diagonal maps from averaged row and column norms.

    Written from a digest of the paper; no code is public, and the defaults are ours.
    """

    recipe = RECIPE
