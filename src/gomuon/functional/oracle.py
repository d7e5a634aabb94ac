"""The matched spectral oracle (Theorem 1) and related functions.

`left` and `right` are the maps P_B [..., m, m] and P_A [..., n, n]; None stands for the identity.
`matched_direction`, `inside_only_direction` and `preconditioned` also take the block-diagonal and
diagonal maps of `block_diagonal.py`, one for each matrix of a batch.
The functions with the same names in `gomuon.functional` check and document the arguments.
"""

import math

import torch
from torch import Tensor

from gomuon.functional import polar_express
from gomuon.functional.block_diagonal import left_product, right_product
from gomuon.functional.linalg import attempt, over_batch
from gomuon.functional.polar_factor import (
    PolarMethod,
    mapped_polar,
    only_multiplies,
    rank_of,
)

Maps = tuple[Tensor | None, Tensor | None]


def matched_direction(
    M: Tensor, left: Tensor | None, right: Tensor | None, *, polar_method: PolarMethod = "svd"
) -> tuple[Tensor, Tensor]:
    """D₀ = P_B·Q·P_A with Q = polar(P_B M P_A), Equations (32) and (33), and the rank of Q, [...].

    Equation (4) at ρ = 1. The maps may be cached: Equation (6).
    """

    def direction(M: Tensor, left: Tensor | None, right: Tensor | None) -> tuple[Tensor, Tensor]:
        C = preconditioned(M, left, right)  # (2), (12), (32)
        Q = mapped_polar(C, polar_method, M, left, right)
        return map_back(Q, left, right), rank_of(Q)  # (4), (13), (33)

    fast = only_multiplies(polar_method, M.dtype)
    map_back = roughly_preconditioned if fast else preconditioned
    D, rank = over_batch(direction, M, left, right, multiplies=fast)
    return D, rank


def inside_only_direction(
    M: Tensor, left: Tensor | None, right: Tensor | None, *, polar_method: PolarMethod = "svd"
) -> Tensor:
    """polar(P_B M P_A) without the map back; ⟨M, D⟩ may be negative, as in Equation (8)."""

    def direction(M: Tensor, left: Tensor | None, right: Tensor | None) -> tuple[Tensor]:
        C = preconditioned(M, left, right)
        return (mapped_polar(C, polar_method, M, left, right),)

    return over_batch(direction, M, left, right, multiplies=only_multiplies(polar_method, M.dtype))[
        0
    ]


def step_efficiency(
    M: Tensor,
    cached: Maps,
    fresh: Maps,
    *,
    polar_method: PolarMethod = "svd",
) -> Tensor:
    """⟨D̃, D⟩/(‖D̃‖_F‖D‖_F), [...], of the directions of cached and of fresh maps, (left, right).

    After the graft both steps have one length, so this is the share of the fresh step that the
    cached one makes, and they differ by √(2 − 2⟨D̃, D⟩/(‖D̃‖_F‖D‖_F)) of it. NaN if M is zero.
    """
    directions = [
        matched_direction(M, *maps, polar_method=polar_method)[0] for maps in (cached, fresh)
    ]
    old, new = (D / torch.linalg.matrix_norm(D, keepdim=True) for D in directions)
    return (old * new).sum(dim=(-2, -1))


def frobenius_graft(D: Tensor, rank: Tensor | None = None) -> Tensor:
    """D·√min(m, n)/‖D‖_F, Equations (14) and (34); with `rank` D·√rank/‖D‖_F."""
    norm = torch.linalg.matrix_norm(D, keepdim=True)
    length = math.sqrt(min(D.shape[-2:])) if rank is None else rank.sqrt()[..., None, None]
    return D * torch.where(norm > 0, norm.reciprocal() * length, 0.0)  # (14), (34)


def weighted_norm(D: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    """q_P(D) = ‖P_B⁻¹ D P_A⁻¹‖_op, Equation (2)."""
    U = D if left is None else attempt(torch.linalg.solve, left, D)
    U = U if right is None else attempt(torch.linalg.solve, right, U, left=False)
    return attempt(torch.linalg.matrix_norm, U, ord=2)


def preconditioned(X: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    """P_B X P_A; C of Equation (2) for X = M. Maps may be block-diagonal or diagonal."""
    if left is not None:
        X = left @ X if left.shape[-1] == X.shape[-2] else left_product(left, X)
    if right is not None:
        X = X @ right if right.shape[-2] == X.shape[-1] else right_product(X, right)
    return X


def roughly_preconditioned(X: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    """P_B X P_A in bfloat16, where the hardware multiplies it natively.

    For mapping a fast polar factor back: rounding to 2^−9 adds less than that factor's own error.
    """
    if X.dtype != torch.float32 or not polar_express.multiplies_bfloat16(X.device):
        return preconditioned(X, left, right)
    P_B, P_A = (None if P is None else P.bfloat16() for P in (left, right))
    return preconditioned(X.bfloat16(), P_B, P_A).to(X.dtype)
