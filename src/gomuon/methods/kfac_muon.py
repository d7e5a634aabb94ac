"""K-FAC Muon as published: matched polar at half power in K-FAC-reduce factors."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gomuon.functional.block_diagonal import diagonal_of
from gomuon.functional.factors import Root, RootBatch
from gomuon.functional.linalg import identity_like
from gomuon.geometry.captured import CapturedMoments
from gomuon.geometry.moments_to_maps import SharedStore, as_map
from gomuon.optimizer import MatrixOptimizer
from gomuon.parameters.layers import Layer
from gomuon.parameters.stacks import Stack
from gomuon.recipes.recipe import OfficialCode, Recipe
from gomuon.recipes.registry import register
from gomuon.recipes.stations import (
    AT_LAST,
    CAPTURE,
    MUON,
    REBUILD,
    ROOTS,
    Clock,
    Group,
    lerp_momentum,
    matched_polar,
    measured_rms_scale,
    rate,
)
from gomuon.recipes.work import (
    CapturedFactors,
    Factors,
    StepWork,
    Work,
    matched_polar_work,
    root_work,
)
from gomuon.settings import DECAY, INTERVAL, NOT_NEGATIVE, Setting, with_defaults


def balanced_root_maps(layers: Sequence[Layer], group: Group) -> list[RootBatch]:
    """(A + π√λ·I)^(−½) and (B + √λ/π·I)^(−½) with π² = (tr A/n)/(tr B/m).

    The traces are those of whole sides, also if the factors are block-diagonal: every block of A
    meets every block of B. A side that is not captured is the identity.
    """
    batches: list[RootBatch] = []
    root = group["damping"] ** 0.5
    for layer in layers:
        # Per matrix: every pair of a row's B and a column's A has its own π.
        A, B = (
            layer.map_per_block("right_factor", "right"),
            layer.map_per_block("left_factor", "left"),
        )
        left, right = layer.forms
        unseen = (A is None and right.kind != "identity") or (B is None and left.kind != "identity")
        like = B if A is None else A
        if like is None or unseen:
            continue
        m, n = layer.shape
        ratio = _mean_eigenvalue(A, n, like) / _mean_eigenvalue(B, m, like)
        pi = torch.where((ratio > 0) & ratio.isfinite(), ratio, 1.0).sqrt()
        for name, factor, ridge in (("right_map", A, pi * root), ("left_map", B, root / pi)):
            if factor is not None:
                damped = factor + ridge.view(-1, *[1] * (factor.ndim - 1)) * identity_like(factor)
                store = SharedStore([[layer]], as_map(name))
                batches.append(RootBatch([damped], Root.of(0.5), store))
    return batches


def _mean_eigenvalue(S: Tensor | None, d: int, like: Tensor) -> Tensor:
    """tr(S)/d of every matrix, [blocks]; 1 for the identity."""
    return like.new_ones(len(like)) if S is None else diagonal_of(S, d).mean(-1)


def damped_from_the_start(X: Tensor, stack: Stack, group: Group) -> Tensor:
    """D = P_B·polar(P_B X P_A)·P_A, with P = (1 + √λ)^(−½)·I until a side's first refresh.

    That is the map of a factor which is still the identity, where every average starts.
    """
    D = matched_polar(X, stack, group)
    starting = [_sides_without_map(layer) for layer in stack.layers]
    if not any(starting):
        return D
    of_identity = (1 + float(group["damping"]) ** 0.5) ** -0.5
    lengths = [
        of_identity**sides
        for layer, sides in zip(stack.layers, starting, strict=True)
        for _ in range(layer.blocks)
    ]
    return D.new_tensor(lengths).view(-1, 1, 1) * D


def _sides_without_map(layer: Layer) -> int:
    """How many sides of a layer wait for their first map."""
    names = zip(("left_map", "right_map"), layer.forms, strict=True)
    return sum(form.kind != "identity" and name not in layer.state for name, form in names)


def constant_scale(D: Tensor, stack: Stack, group: Group) -> Tensor:
    """c·D, whatever the sides of the matrix."""
    return group["scale"] * D


def _root_work(x: Factors, group: Group) -> Work:
    return root_work(x, group, 0.5)


WORK = StepWork(matched_polar_work, captured=CapturedFactors(_root_work, one_for="block"))
# Of the public code.
COMMIT = "e4f79cc825fe2270034558b353b659a55a824f23"

RECIPE = Recipe(
    "KFACMuon",
    geometry=CapturedMoments(
        balanced_root_maps, start=1.0, description="K-FAC-reduce activation/backward moments"
    ),
    clock=Clock(statistics="refresh_every", maps="refresh_every", at="refresh_at"),
    source=lerp_momentum,
    direction=damped_from_the_start,
    scale=constant_scale,
    rms_scale=measured_rms_scale,
    settings={
        **rate(0.02),
        **MUON,
        **ROOTS,
        "factor_decay": Setting(0.95, DECAY),
        "damping": Setting(1e-3, NOT_NEGATIVE),
        "refresh_every": Setting(20, INTERVAL),
        **AT_LAST,
        "scale": Setting(0.1, NOT_NEGATIVE),
        **with_defaults(CAPTURE, reduce=True),
        **REBUILD,
    },
    formula="D = .1·P_B·polar(P_B M̂ P_A)·P_A;  P = (factor + π-balanced damping)^−½, no graft",
    origin="LukeTri/kfac-muon; symmetric roots, which give the same update as its Cholesky factors",
    official=(
        OfficialCode(
            "LukeTri/kfac-muon, train.py",
            commit=COMMIT,
            theirs="--opt kfac_muon, and no Levenberg–Marquardt damping, which other commits add",
        ),
    ),
    departures=(
        "Commit 055b021 of the public code starts averages with the first observation and also "
        "refreshes at the first update; we follow the earlier one.",
    ),
    work=WORK,
)


@register
class KFACMuon(MatrixOptimizer):
    """K-FAC Muon: matched polar at half power in π-balanced K-FAC-reduce factors.

    Averages start from the identity and are refreshed at updates K, 2K, …. Before a layer's first
    refresh its maps are those of the identity, (1 + √λ)^(−½)·I with λ = `damping`. Steps have the
    length `scale`, whatever the sides of a matrix. `refresh_at="first"` refreshes at updates 1,
    K + 1, … instead. π is that of whole sides, also if their factors are block-diagonal
    (`block_size`). `MatchedKFAC` is our variant.
    """

    recipe = RECIPE
