"""Matched polar at half power with π-balanced K-FAC-reduce factors: ours, after kfac-muon."""

from torch import Tensor

from gomuon.geometry.captured import CapturedMoments
from gomuon.methods.kfac_muon import COMMIT, WORK, balanced_root_maps
from gomuon.optimizer import MatrixOptimizer
from gomuon.parameters.stacks import Stack
from gomuon.recipes.recipe import OfficialCode, OlderCheckpoints, Recipe
from gomuon.recipes.registry import register
from gomuon.recipes.stations import (
    CAPTURE,
    MUON,
    REBUILD,
    ROOTS,
    Clock,
    Group,
    aspect,
    lerp_momentum,
    matched_polar,
    measured_rms_scale,
    rate,
)
from gomuon.settings import DECAY, INTERVAL, NOT_NEGATIVE, Setting, with_defaults


def scaled_muon(D: Tensor, stack: Stack, group: Group) -> Tensor:
    """c·√max(1, m/n)·D."""
    return group["scale"] * aspect(D) * D


RECIPE = Recipe(
    "MatchedKFAC",
    geometry=CapturedMoments(
        balanced_root_maps, description="K-FAC-reduce activation/backward moments"
    ),
    clock=Clock(statistics="refresh_every", maps="refresh_every"),
    source=lerp_momentum,
    direction=matched_polar,
    scale=scaled_muon,
    rms_scale=measured_rms_scale,
    settings={
        **rate(0.02),
        **MUON,
        **ROOTS,
        "factor_decay": Setting(0.95, DECAY),
        "damping": Setting(1e-3, NOT_NEGATIVE),
        "refresh_every": Setting(50, INTERVAL),
        "scale": Setting(0.1, NOT_NEGATIVE),
        **with_defaults(CAPTURE, reduce=True),
        **REBUILD,
    },
    formula="D = P_B·polar(P_B M̂ P_A)·P_A;  P = (factor + π-balanced damping)^−½, no graft",
    origin="ours, after LukeTri/kfac-muon, which is `KFACMuon`",
    official=(OfficialCode("LukeTri/kfac-muon, train.py", commit=COMMIT, ours=None),),
    departures=(
        "The first refresh is at the first update, and its observation starts the averages.",
        "√max(1, m/n) lengthens the steps of tall matrices.",
        "Refreshes are every 50 updates.",
    ),
    older=OlderCheckpoints("refresh_at", name="KFACMuon"),
    work=WORK,
)


@register
class MatchedKFAC(MatrixOptimizer):
    """Matched polar at half power with π-balanced K-FAC-reduce factors and no graft.

    It differs from `KFACMuon` in its clock, in how averages start and in its length. π is that of
    whole sides, also if their factors are block-diagonal (`block_size`). In version 0.1.0 it had
    the name `KFACMuon`, and its checkpoints from there load.
    """

    recipe = RECIPE
