"""K-FAC Muon as published: matched polar at half power in K-FAC-reduce factors."""

from torch import Tensor

from gomuon.geometry.captured import CapturedMoments
from gomuon.methods.matched_kfac import COMMIT, WORK, balanced_root_maps
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
from gomuon.settings import DECAY, INTERVAL, NOT_NEGATIVE, Setting, with_defaults


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
    formula="D = P_B·polar(P_B M̂ P_A)·P_A;  P = (factor + π-balanced damping)^−½, length .1, no graft",
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
