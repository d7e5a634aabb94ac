"""Dion: a step of low rank, by one power iteration, and the rest left in the momentum."""

from typing import ClassVar

import torch
from torch import Tensor

from gomuon.functional import linalg
from gomuon.functional.linalg import full_float32, over_batch
from gomuon.functional.orthonormal import orthonormalised, spread_numbers
from gomuon.geometry.base import Geometry
from gomuon.optimizer import MatrixOptimizer
from gomuon.parameters.stacks import Stack
from gomuon.parameters.state import Entries, Side
from gomuon.recipes.recipe import OfficialCode, Recipe
from gomuon.recipes.registry import register
from gomuon.recipes.stations import MUON, STATE, Group, aspect_scale, measured_rms_scale, rate
from gomuon.recipes.work import Decomposition, Kept, Matrices, Product, StepWork, Work, momentum
from gomuon.settings import DECAY, FLAG, NOT_NEGATIVE, POSITIVE_SHARE, Setting

_Q = "right_vectors"


class RightVectors(Geometry):
    """No maps; Q, an estimate of the leading right singular vectors of the momentum."""

    entries: ClassVar[Entries] = {_Q: Side(1, form="columns", numbers="cosines")}


def _rank(m: int, n: int, group: Group) -> int:
    return max(1, int(group["rank_fraction"] * min(m, n)))


def momentum_and_gradient(stack: Stack, group: Group) -> Tensor:
    """B = M + G."""
    return stack.memory("momentum") + stack.G


def low_rank(X: Tensor, stack: Stack, group: Group) -> Tensor:
    """D = PQᵀ with P = QR(XQ₋), R = XᵀP and Q = R with columns of length one.

    The memory is M ← X − (1 − μ)PRᵀ: what the step has not taken stays (error feedback). Where X is
    zero there is no step, and Q stays.
    """
    kept = stack.map(_Q)
    Q = _start(X, group) if kept is None else kept
    some = (X != 0).any(dim=-1, keepdim=True).any(dim=-2, keepdim=True)
    P = _orthonormal(X @ Q) * some
    R = X.mT @ P
    M = stack.memory("momentum")
    stack.remember(M, X - (1 - group["momentum"]) * (P @ R.mT))
    unit = R / (torch.linalg.vector_norm(R, dim=-2, keepdim=True) + group["eps"])
    Q = stack.usable(torch.where(some, unit, Q), Q)
    stack.set(_Q, Q)
    return P @ Q.mT


def _start(X: Tensor, group: Group) -> Tensor:
    """The first Q, the same on every rank and device."""
    m, n = X.shape[-2:]
    like = X.new_empty(n, _rank(m, n, group))
    Q = spread_numbers(like)
    Q = Q / torch.linalg.vector_norm(Q, dim=-2, keepdim=True)
    return Q.expand(len(X), *Q.shape)


def _orthonormal(X: Tensor) -> Tensor:
    """Q of X = QR, up to the signs of its columns, which cancel in PQᵀ and in PRᵀ."""
    if linalg.decomposes_well(X.device):
        return over_batch(lambda part: torch.linalg.qr(part), X)[0]
    with full_float32():
        return orthonormalised(X)


def _step_work(x: Matrices, group: Group) -> Work:
    """XQ and its QR, XᵀP, PRᵀ and PQᵀ."""
    r = _rank(x.m, x.n, group)
    return [
        Product(x.count, x.m, x.n, r),
        Decomposition(x.count, "qr", x.m, r),
        Product(x.count, x.n, x.m, r),
        Product(2 * x.count, x.m, r, x.n),
    ]


def _kept(x: Matrices, group: Group) -> Kept:
    """Momentum and Q."""
    return {**momentum(x, group), _Q: x.count * x.n * _rank(x.m, x.n, group)}


RECIPE = Recipe(
    "Dion",
    geometry=RightVectors(),
    source=momentum_and_gradient,
    direction=low_rank,
    scale=aspect_scale,
    rms_scale=measured_rms_scale,
    settings={
        **rate(0.01),
        "momentum": Setting(0.95, DECAY),
        "weight_decay": Setting(0.01, NOT_NEGATIVE),
        "cautious_decay": Setting(False, FLAG),
        **STATE,
        "lr_scale": MUON["lr_scale"],
        "rank_fraction": Setting(1.0, POSITIVE_SHARE),
        "eps": Setting(1e-8, NOT_NEGATIVE),
    },
    formula="D = √(m/n)·PQᵀ, P = QR((M + G)Q₋), Q = (M + G)ᵀP with unit columns; M keeps the rest",
    origin="Ahn et al. 2025 (arXiv 2504.05295), microsoft/dion",
    official=(
        OfficialCode(
            "microsoft/dion, dion/dion_simple.py",
            "6e2c58d477722c47472fd9de54b9889d1d5ffb6d",
            theirs="rank=min(m, n), lr=0.01 and our first Q in place of its random one",
        ),
    ),
    departures=(
        "The first Q is made of fixed numbers, with columns of length one, so that ranks agree; "
        "the code's is random.",
        "A momentum of zeros leaves Q as it is, as the full code does.",
        "Q is always on the side of the inputs, as in the paper; the full code takes the shorter.",
    ),
    work=StepWork(_step_work, keeps=_kept),
)


@register
class Dion(MatrixOptimizer):
    """Dion: an orthonormal step of low rank, and error feedback into the momentum.

    B = M + G is nearly PRᵀ after one power iteration from the last step's Q; W ← W − η√(m/n)·PQᵀ,
    and the momentum keeps B − (1 − μ)PRᵀ. `momentum` is μ, `rank_fraction` the rank as a share of
    the shorter side. This is the method, not its communication: ranks share work and gradients as
    for every other method here. On accelerators QR is Gram–Schmidt.
    """

    recipe = RECIPE
