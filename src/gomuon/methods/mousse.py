"""Mousse: matched polar in trace-normalised gradient-Gram geometry."""

import torch
from torch import Tensor

from gomuon.functional.factors import Root, inverse_power
from gomuon.functional.linalg import decompose, identity_like, trace_mean
from gomuon.functional.oracle import inside_only_direction, preconditioned
from gomuon.functional.product_roots import product_root
from gomuon.geometry.gradient_grams import GradientGrams, Prepared
from gomuon.optimizer import MatrixOptimizer
from gomuon.parameters.stacks import Stack
from gomuon.recipes.recipe import OfficialCode, Recipe
from gomuon.recipes.registry import register
from gomuon.recipes.stations import (
    MUON,
    OFFLOAD,
    ROOTS,
    Clock,
    Group,
    length,
    lerp_momentum,
    rate,
    ratio_scale,
    to_length,
)
from gomuon.recipes.work import (
    Matrices,
    StepWork,
    Work,
    both_roots_work,
    gram_work,
    maps_work,
    momentum_factors_and_maps,
    plain_polar_work,
)
from gomuon.settings import (
    DECAY,
    EXPONENT,
    INTERVAL,
    NOT_NEGATIVE,
    ROTATED,
    Setting,
    one_of,
    with_defaults,
)


def trace_normalised_roots(observations: int, group: Group) -> tuple[Root, Prepared]:
    """Bias-corrected, scaled to mean eigenvalue one, + εI, eigenvalues lifted to ≥ ε; then ^−α.

    By products, negative eigenvalues have the floor of `product_root` instead.
    """

    def normalised(S: Tensor) -> Tensor:
        corrected = S / (1 - group["factor_decay"] ** observations)
        scale = trace_mean(corrected)
        mean_one = torch.where(scale > 0, corrected / scale, identity_like(S))
        return mean_one + group["epsilon"] * identity_like(S)

    def of_eigen(values: Tensor, V: Tensor) -> Tensor:
        shift = (-values.amin(-1, keepdim=True)).clamp_min(0) + group["epsilon"]
        return inverse_power(values + shift, V, group["alpha"])

    def root(S: Tensor) -> Tensor:
        return of_eigen(*decompose(torch.linalg.eigh, S))

    def multiplied(S: Tensor) -> tuple[Tensor, Tensor]:
        return product_root(S + group["epsilon"] * identity_like(S), group["alpha"])

    return Root(root, multiplied, of_eigen), normalised


def matched_polar_own_length(X: Tensor, stack: Stack, group: Group) -> Tensor:
    """Q = polar(P_B X P_A); D = P_B Q P_A rescaled to ‖Q‖_F."""
    left, right = stack.map("left_map"), stack.map("right_map")
    Q = inside_only_direction(X, left, right, polar_method=group["polar"])
    return to_length(preconditioned(Q, left, right), length(Q))


def _step_work(x: Matrices, group: Group) -> Work:
    """Both maps inside the polar factor and outside."""
    return 2 * maps_work(x, True, True) + plain_polar_work(x, group)


def _root_work(x: Matrices, group: Group) -> Work:
    return both_roots_work(x, group, group["alpha"])


RECIPE = Recipe(
    "Mousse",
    geometry=GradientGrams(trace_normalised_roots),
    clock=Clock(statistics="statistics_every", maps="refresh_every"),
    source=lerp_momentum,
    direction=matched_polar_own_length,
    scale=ratio_scale,
    settings={
        **rate(0.01),
        **with_defaults(MUON, nesterov=False, weight_decay=0.01),
        **ROOTS,
        **OFFLOAD,
        "factor_decay": Setting(0.95, DECAY),
        "alpha": Setting(0.125, EXPONENT),
        "epsilon": Setting(1e-10, NOT_NEGATIVE),
        "statistics_every": Setting(1, INTERVAL),
        "refresh_every": Setting(10, ROTATED),
        "aspect": Setting("ratio", one_of("ratio", "max")),
    },
    formula="Q = polar(P_L M̂ P_R), D = P_L Q P_R at ‖Q‖_F;  P = (trace-normalised Gram)^−⅛",
    origin="Anti-Entrophic/Mousse, with the exact polar",
    official=(
        OfficialCode(
            "Anti-Entrophic/Mousse, dion/dion/mousse.py",
            commit="d00c1bf17790fbe56424ee5567cce80d8e75f4b2",
        ),
    ),
    work=StepWork(
        _step_work,
        observe=gram_work,
        renew=_root_work,
        keeps=momentum_factors_and_maps,
    ),
)


@register
class Mousse(MatrixOptimizer):
    """Mousse: matched polar in trace-normalised gradient-Gram geometry, power ⅛.

    The published ε of 1e-10 is below float32's roundoff: for a singular factor, rounding decides
    the smallest eigenvalues. The published code does the same. Its authors also use 1e-5.
    """

    recipe = RECIPE
