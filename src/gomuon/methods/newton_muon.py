"""Newton-Muon: gradients multiplied by an inverse activation moment before the momentum."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from gomuon.functional.factors import Root, RootBatch
from gomuon.functional.linalg import identity_like, is_diagonal, trace_mean
from gomuon.functional.oracle import preconditioned
from gomuon.functional.product_roots import product_root
from gomuon.geometry.captured import CapturedMoments
from gomuon.geometry.moments_to_maps import map_batches
from gomuon.optimizer import MatrixOptimizer
from gomuon.parameters.layers import Layer
from gomuon.parameters.stacks import Stack
from gomuon.recipes.recipe import Recipe
from gomuon.recipes.registry import register
from gomuon.recipes.stations import (
    CAPTURE,
    MUON,
    REBUILD,
    ROOTS,
    Clock,
    Group,
    lerp,
    muon_scale,
    plain_polar,
    rate,
)
from gomuon.recipes.work import (
    CapturedFactors,
    Decomposition,
    Factors,
    Matrices,
    StepWork,
    Work,
    maps_work,
    plain_polar_work,
    root_work,
)
from gomuon.settings import DECAY, INTERVAL, NOT_NEGATIVE, Setting


def ridge_inverse_map(layers: Sequence[Layer], group: Group) -> list[RootBatch]:
    """P_A = (A + (d·tr(A)/n + 1e-8)·I)⁻¹, block by block if A is block-diagonal."""

    def damped(S: Tensor) -> Tensor:
        ridge = group["damping"] * trace_mean(S) + 1e-8
        return S + ridge * identity_like(S)

    def inverse_of(S: Tensor) -> Tensor:
        return S.reciprocal() if is_diagonal(S) else torch.linalg.inv(S)

    inverse = partial(product_root, power=1.0)
    return map_batches(layers, "right", Root(inverse_of, inverse), prepared=damped)


def momentum_of_right_preconditioned(stack: Stack, group: Group) -> Tensor:
    """M ← βM + (1−β)·G P_A: the geometry enters before the average."""
    G = preconditioned(stack.G, None, stack.map("right_map"))
    return lerp(stack.usable(G, 0.0), stack, group)


def _step_work(x: Matrices, group: Group) -> Work:
    """G P_A, then a polar factor."""
    return maps_work(x, False, x.captured[1]) + plain_polar_work(x, group)


def _inverse_work(x: Factors, group: Group) -> Work:
    if group["roots"] == "products":
        return root_work(x, group, 1.0)
    return [Decomposition(x.count, "inv", x.d, x.d)]


RECIPE = Recipe(
    "NewtonMuon",
    geometry=CapturedMoments(
        ridge_inverse_map, start=1e-3, only="right", description="activation moments"
    ),
    clock=Clock(statistics="refresh_every", maps="refresh_every"),
    source=momentum_of_right_preconditioned,
    direction=plain_polar,
    scale=muon_scale,
    settings={
        **rate(0.02),
        **MUON,
        **ROOTS,
        "factor_decay": Setting(0.95, DECAY),
        "damping": Setting(0.2, NOT_NEGATIVE),
        "refresh_every": Setting(32, INTERVAL),
        **CAPTURE,
        **REBUILD,
    },
    formula="D = polar(M̂), M the momentum of G(K + (.2·tr K/n + 1e-8)I)⁻¹",
    origin="zhehangdu/Newton-Muon",
    work=StepWork(_step_work, captured=CapturedFactors(_inverse_work)),
)


@register
class NewtonMuon(MatrixOptimizer):
    """Newton-Muon: gradients multiplied by an inverse activation moment before the momentum.

    If A is block-diagonal (`block_size`), every block has the ridge of its own trace.
    """

    recipe = RECIPE
