"""Newton-Muon: gradients multiplied by an inverse activation moment before the momentum."""

import math
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
from gomuon.recipes.recipe import OfficialCode, OlderCheckpoints, Recipe
from gomuon.recipes.registry import register
from gomuon.recipes.stations import (
    AT_LAST,
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
from gomuon.settings import DECAY, INTERVAL, NOT_NEGATIVE, Setting, one_of


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


def long_or_muon_scale(D: Tensor, stack: Stack, group: Group) -> Tensor:
    """√max(m, n)·D with aspect "longest", otherwise √max(1, m/n)·D."""
    if group["aspect"] == "longest":
        return math.sqrt(max(D.shape[-2:])) * D
    return muon_scale(D, stack, group)


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
    clock=Clock(statistics="refresh_every", maps="refresh_every", at="refresh_at"),
    source=momentum_of_right_preconditioned,
    direction=plain_polar,
    scale=long_or_muon_scale,
    settings={
        **rate(0.02),
        **MUON,
        **ROOTS,
        "factor_decay": Setting(0.95, DECAY),
        "damping": Setting(0.2, NOT_NEGATIVE),
        "refresh_every": Setting(32, INTERVAL),
        **AT_LAST,
        "aspect": Setting("max", one_of("max", "longest")),
        **CAPTURE,
        **REBUILD,
    },
    formula="D = polar(M̂), M the momentum of G(K + (.2·tr K/n + 1e-8)I)⁻¹",
    origin="zhehangdu/Newton-Muon",
    official=(
        OfficialCode(
            "zhehangdu/Newton-Muon, train_gpt_newton_muon_1.py",
            commit="9ab3feffc28586ba3d745a23f1a732d03c7fd139",
            ours={"lr": 4e-4, "aspect": "longest"},
            theirs=(
                "specs: LayerSpec(inputs=d) for the MLP's projections from 4d to d, and "
                "LayerSpec(parts=3) for a fused qkv"
            ),
        ),
    ),
    older=OlderCheckpoints("refresh_at", settings={"refresh_at": "first"}),
    work=StepWork(_step_work, captured=CapturedFactors(_inverse_work)),
)


@register
class NewtonMuon(MatrixOptimizer):
    """Newton-Muon: gradients multiplied by an inverse activation moment before the momentum.

    A is refreshed at updates K, 2K, …; until then a layer's step is Muon's. If A is block-diagonal
    (`block_size`, or `LayerSpec(inputs=…)` for one layer), every block has the ridge of its own
    trace: the public code contracts an MLP's projection from 4d to d in four blocks of d × d.

    Its steps have the length √max(m, n), at a rate of 4e-4; that is `aspect="longest"`. Our default
    is Muon's √max(1, m/n), so that Muon's rates suit models of any width. `refresh_at="first"`
    refreshes at updates 1, K + 1, … instead; checkpoints of version 0.1.0 continue so.
    """

    recipe = RECIPE
