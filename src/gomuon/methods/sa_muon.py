"""SAMuon: the polar factor with another length in all but the leading singular direction."""

from torch import Tensor

from gomuon.functional.polar_factor import polar
from gomuon.functional.spectra import SQUARINGS, leading_projector
from gomuon.geometry.base import Geometry
from gomuon.optimizer import MatrixOptimizer
from gomuon.parameters.stacks import Stack
from gomuon.recipes.recipe import Recipe
from gomuon.recipes.registry import register
from gomuon.recipes.stations import (
    MUON,
    Group,
    length,
    lerp_momentum,
    measured_rms_scale,
    muon_scale,
    rate,
)
from gomuon.recipes.work import Matrices, Product, StepWork, Work, plain_polar_work
from gomuon.settings import NOT_NEGATIVE, Setting


def leading_and_bulk(X: Tensor, stack: Stack, group: Group) -> Tensor:
    """D = u₁v₁ᵀ + γ(polar(X) − u₁v₁ᵀ), where u₁v₁ᵀ = u₁u₁ᵀ·polar(X) needs no decomposition."""
    Q, gamma = polar(X, group["polar"]), group["gamma"]
    Y = X / length(X).clamp_min(1e-30)  # keeps the squares in range
    leading = leading_projector(Y @ Y.mT) @ Q if _wide(X) else Q @ leading_projector(Y.mT @ Y)
    return gamma * Q + (1 - gamma) * leading


def _wide(X: Tensor) -> bool:
    return X.shape[-2] <= X.shape[-1]


def _step_work(x: Matrices, group: Group) -> Work:
    """The polar factor, the smaller Gram matrix and its squares, and the product with them."""
    k, n = sorted((x.m, x.n))
    squares = Product(SQUARINGS * x.count, k, k, k)
    both = Product(x.count, k, n, k), Product(x.count, k, k, n)
    return [*plain_polar_work(x, group), squares, *both]


RECIPE = Recipe(
    "SAMuon",
    geometry=Geometry(),
    source=lerp_momentum,
    direction=leading_and_bulk,
    scale=muon_scale,
    rms_scale=measured_rms_scale,
    settings={**rate(0.02), **MUON, "gamma": Setting(0.5, NOT_NEGATIVE)},
    formula="D = u₁v₁ᵀ + γ(polar(M̂) − u₁v₁ᵀ), u₁ and v₁ the leading singular vectors of M̂",
    origin=(
        "our interpretation of its one-line description, leading direction ×1 and bulk ×γ: neither "
        "code nor paper could be read, and its numbers are ours"
    ),
    work=StepWork(_step_work),
)


@register
class SAMuon(MatrixOptimizer):
    """SAMuon: the leading singular direction as in Muon, all others γ times as long.

    This is our interpretation of "leading direction ×1, bulk ×γ". Neither code nor paper could be
    read, so γ = ½ and the other defaults are ours, Muon's. Singular values that are nearly equal to
    the largest share the leading direction.
    """

    recipe = RECIPE
