"""QSD: K-FAC's quadratic model, minimised over the spectral ball. An interpretation."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gomuon.functional.factors import Root, RootBatch
from gomuon.functional.linalg import finite_factors
from gomuon.functional.oracle import preconditioned
from gomuon.functional.polar_factor import PolarMethod, polar
from gomuon.geometry.captured import CapturedMoments
from gomuon.geometry.moments_to_maps import map_batches
from gomuon.optimizer import MatrixOptimizer
from gomuon.parameters.layers import Layer
from gomuon.parameters.stacks import Stack
from gomuon.recipes.recipe import Recipe
from gomuon.recipes.registry import register
from gomuon.recipes.stations import (
    ADAMW_RMS,
    CAPTURE,
    CURVATURE,
    PAPER,
    Clock,
    Group,
    length,
    lerp_momentum,
    muon_scale,
    rate,
)
from gomuon.recipes.work import (
    CapturedFactors,
    Factors,
    Matrices,
    StepWork,
    Work,
    maps_work,
    plain_polar_work,
)
from gomuon.settings import INTERVAL, NOT_NEGATIVE, Setting


def _unchanged(S: Tensor) -> Tensor:
    return S


def _unchanged_and_usable(S: Tensor) -> tuple[Tensor, Tensor]:
    return S, finite_factors(S)


FACTOR_ITSELF = Root(_unchanged, _unchanged_and_usable)


def factor_maps(layers: Sequence[Layer], group: Group) -> list[RootBatch]:
    """The factors B̄ and A themselves: the model's curvature is a product with both."""
    return [
        batch for side in ("left", "right") for batch in map_batches(layers, side, FACTOR_ITSELF)
    ]


def ball_minimiser(
    M: Tensor,
    left: Tensor | None,
    right: Tensor | None,
    curvature: float | Tensor,
    *,
    steps: int,
    polar_method: PolarMethod = "svd",
) -> Tensor:
    """U that nearly minimises −⟨M, U⟩ + ½·curvature·tr(UᵀBUA) over ‖U‖_op ≤ 1.

    By Frank–Wolfe steps from U = 0: the vertex polar(M − curvature·BUA) maximises the negative
    gradient over the ball, and the step towards it is the best one. So U stays in the ball, and the
    model falls with every step. Without curvature, one step gives polar(M).

    Args:
        M: [b, m, n].
        left: B, or None for the identity; in any form of a map.
        right: A, or None for the identity.
        curvature: at least 0.
        steps: how many polar factors are taken.
        polar_method: see `polar`.
    """
    rounding = 4 * torch.finfo(M.dtype).eps
    U = BUA = torch.zeros_like(M)
    for _ in range(steps):
        downhill = M - curvature * BUA
        V = polar(downhill, polar_method)
        BVA = preconditioned(V, left, right)
        S, BSA = V - U, BVA - BUA
        gain = (downhill * S).sum(dim=(-2, -1), keepdim=True)
        # No gain is negative. Near the minimum it is the small difference of two large sums, and
        # below their rounding errors it would be noise, which would take or leave a whole step.
        gain = torch.maximum(gain, rounding * length(downhill) * length(V))
        bend = curvature * (S * BSA).sum(dim=(-2, -1), keepdim=True)
        share = torch.where(bend > 0, gain / bend, 1.0).clamp(0, 1)
        U, BUA = U + share * S, BUA + share * BSA
    return U


def ball_radius(m: int, n: int, group: Group) -> float | Tensor:
    """How long a singular value of the update may be: lr·√max(1, m/n), or AdamW's length."""
    if group.get("lr_scale") == "adamw":
        return group["lr"] * ADAMW_RMS * math.sqrt(max(m, n))
    return group["lr"] * math.sqrt(max(1.0, m / n))


def quadratic_minimiser(X: Tensor, stack: Stack, group: Group) -> Tensor:
    """D of the unit ball, so that the update r·D minimises −⟨X, rD⟩ + ½·scale·tr((rD)ᵀB(rD)A)."""
    radius = ball_radius(*stack.shape, group)
    return ball_minimiser(
        X,
        stack.map("left_map"),
        stack.map("right_map"),
        group["scale"] * radius,
        steps=group["steps"],
        polar_method=group["polar"],
    )


def _step_work(x: Matrices, group: Group) -> Work:
    """In each Frank–Wolfe step a polar factor, and BVA of it."""
    return group["steps"] * [*plain_polar_work(x, group), *maps_work(x, *x.captured)]


def _no_map_work(x: Factors, group: Group) -> Work:
    return []


RECIPE = Recipe(
    "QSD",
    geometry=CapturedMoments(
        factor_maps,
        elapsed=True,
        inputs_decay="input_decay",
        shrunk=True,
        description="OAS activation/backward moments themselves",
    ),
    clock=Clock(statistics="refresh_every", maps="refresh_every"),
    source=lerp_momentum,
    direction=quadratic_minimiser,
    scale=muon_scale,
    settings={
        **rate(0.08),
        **PAPER,
        **CAPTURE,
        **{
            name: CURVATURE[name]
            for name in ("refresh_every", "factor_decay", "input_decay", "shrinkage")
        },
        "scale": Setting(1.0, NOT_NEGATIVE),
        "steps": Setting(3, INTERVAL),
    },
    formula="D = argmin −⟨M̂,D⟩ + ½ρ·tr(DᵀB̄DA) over ‖D‖_op ≤ 1, by Frank–Wolfe; ρ = scale·radius",
    origin="our interpretation: no code is public; its factors are Go-MUON's",
    work=StepWork(
        _step_work,
        captured=CapturedFactors(
            _no_map_work, keeps_inputs=lambda group: group.get("input_decay") is not None
        ),
    ),
)


@register
class QSD(MatrixOptimizer):
    """K-FAC's quadratic model of the loss, minimised over a spectral ball.

    The update is −rD, where D minimises −⟨M̂, D⟩ + ½·scale·r·tr(DᵀB̄DA) over ‖D‖_op ≤ 1 and
    r = lr·√max(1, m/n) is the ball's radius. `steps` Frank–Wolfe steps are taken, each with one
    polar factor and an exact line search. A small rate gives Muon's step; a large one gives K-FAC's
    own minimum, inside the ball. So the curvature decides how long a step is, and no graft follows.

    No code is public, and this is our interpretation. The factors are those of Go-MUON at its
    defaults (OAS, B̄ averaged, A not), and the source is its momentum, so that a comparison of the
    two compares what is done with the same factors. A side without a factor is the identity.
    """

    recipe = RECIPE
