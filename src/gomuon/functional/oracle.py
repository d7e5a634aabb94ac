"""The matched spectral oracle and its relatives."""

import math

import torch
from torch import Tensor

from gomuon.functional import checks
from gomuon.functional.linalg import attempt, over_batch
from gomuon.functional.polar import PolarMethod, polar


def matched_direction(
    M: Tensor, left: Tensor | None, right: Tensor | None, *, polar_method: PolarMethod = "svd"
) -> Tensor:
    """D₀ = P_B·polar(P_B M P_A)·P_A, the exact oracle of Theorem 1: ⟨M, D₀⟩ = ‖P_B M P_A‖_*.

    Args:
        M: [..., m, n] the source.
        left: [..., m, m] symmetric positive definite P_B, or None for the identity.
        right: [..., n, n] symmetric positive definite P_A, or None for the identity.
        polar_method: see `polar`.

    Raises:
        TypeError: an argument is not a tensor, or polar_method not a name.
        ValueError: shapes, dtypes or devices do not fit, or the method is unknown.
        DecompositionError: see `polar`.
    """
    M = checks.sided(M, left, right)
    checks.method(polar_method)
    return matched_direction_and_rank(M, left, right, polar_method=polar_method)[0]


def matched_direction_and_rank(
    M: Tensor, left: Tensor | None, right: Tensor | None, *, polar_method: PolarMethod = "svd"
) -> tuple[Tensor, Tensor]:
    """D₀ as `matched_direction`, and the rank of its polar factor, [...]."""

    def direction(M: Tensor, left: Tensor | None, right: Tensor | None) -> tuple[Tensor, Tensor]:
        Q = polar(preconditioned(M, left, right), polar_method)
        return preconditioned(Q, left, right), rank_of(Q)

    D, rank = over_batch(direction, M, left, right)
    return D, rank


def rank_of(Q: Tensor) -> Tensor:
    """The rank of a polar factor, [...]: its singular values are zero or one."""
    return Q.square().sum(dim=(-2, -1)).round()


def inside_only_direction(
    M: Tensor, left: Tensor | None, right: Tensor | None, *, polar_method: PolarMethod = "svd"
) -> Tensor:
    """polar(P_B M P_A) without the map back; its alignment with M may be negative (Section 2.2).

    Takes and raises what `matched_direction` does.
    """
    M = checks.sided(M, left, right)
    checks.method(polar_method)
    return polar(preconditioned(M, left, right), polar_method)


def frobenius_graft(D: Tensor, rank: Tensor | None = None) -> Tensor:
    """D rescaled to ‖D‖_F = √min(m, n), Muon's update energy (Equation 14); 0 stays 0.

    With `rank` [...], the rank of the polar factor, to √rank. At full rank that is the same. Below,
    Muon's own update has that length, and √min(m, n) would stretch the directions that are left.

    Raises:
        TypeError: D or rank is not a tensor.
        ValueError: D is not [..., m, n], or not of floating-point numbers; or rank is not one
            number for each matrix.
    """
    checks.matrix(D, "D")
    if rank is not None:
        checks.floating(rank, "rank", "[...]", 0)
        checks.alike(rank, "rank", D, "D")
        if rank.shape != D.shape[:-2]:
            raise ValueError(
                f"rank must have a number for each matrix of D, shape {tuple(D.shape[:-2])}, got "
                f"shape {tuple(rank.shape)}"
            )
    norm = torch.linalg.matrix_norm(D, keepdim=True)
    length = math.sqrt(min(D.shape[-2:])) if rank is None else rank.sqrt()[..., None, None]
    return D * torch.where(norm > 0, norm.reciprocal() * length, 0.0)


def weighted_norm(D: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    """q_P(D) = ‖P_B⁻¹ D P_A⁻¹‖_op (Equation 2), the norm whose unit ball D₀ supports.

    Raises:
        TypeError: an argument is not a tensor.
        ValueError: shapes, dtypes or devices do not fit, or D has no entries.
        DecompositionError: left or right is singular, or something is not finite.
    """
    D = checks.sided(D, left, right, ("D", "left", "right"))
    checks.not_empty(D, "D")
    U = D if left is None else attempt(torch.linalg.solve, left, D)
    U = U if right is None else attempt(torch.linalg.solve, right, U, left=False)
    return attempt(torch.linalg.matrix_norm, U, ord=2)


def preconditioned(X: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    """P_B X P_A."""
    X = X if left is None else left @ X
    return X if right is None else X @ right
