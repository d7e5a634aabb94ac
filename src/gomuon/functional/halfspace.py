"""The halfspace baseline of the map-back study: a reading, the paper does not define it."""

import torch
from torch import Tensor

from gomuon.functional.oracle import preconditioned
from gomuon.functional.polar import PolarMethod, polar


def halfspace_direction(
    M: Tensor,
    left: Tensor | None,
    right: Tensor | None,
    *,
    tau: float = 0.0,
    polar_method: PolarMethod = "svd",
    bisections: int = 30,
) -> Tensor:
    """Inside-only score with a half-space safeguard: the maximiser of ⟨P_B M P_A, U⟩.

    Over ‖U‖_op ≤ 1 and ⟨M, U⟩ ≥ τ‖M‖_*. By Lagrange duality it is polar(Z + λM) with
    Z = P_B M P_A and the smallest λ ≥ 0 that meets the second constraint, found by bisection.

    Args:
        M: [..., m, n] the source.
        left: [..., m, m] P_B = B^(−1/2) in the study, or None.
        right: [..., n, n] P_A = A^(−1/2), or None.
        tau: the share of ‖M‖_* to keep, in [0, 1).
        polar_method: see `polar`.
        bisections: halvings of the bracket; the side that meets the constraint is returned.
    """
    if not 0 <= tau < 1:
        raise ValueError(f"tau must be in [0, 1), got {tau!r}")
    Z = preconditioned(M, left, right)
    U = polar(Z, polar_method)
    wanted = tau * torch.linalg.matrix_norm(M, ord="nuc") if tau else torch.zeros_like(M[..., 0, 0])
    violated = _inner(M, U) < wanted
    if not bool(violated.any()):
        return U
    # Only what violates is bisected.
    U[violated] = _bisect(M[violated], Z[violated], wanted[violated], polar_method, bisections)
    return U


def _bisect(M: Tensor, Z: Tensor, wanted: Tensor, method: PolarMethod, bisections: int) -> Tensor:
    def at(multiplier: Tensor) -> tuple[Tensor, Tensor]:
        U = polar(Z + multiplier[:, None, None] * M, method)
        return U, _inner(M, U) >= wanted

    low = torch.zeros_like(wanted)
    # ⟨M, polar(Z + λM)⟩ grows with λ and tends to ‖M‖_*, so doubling finds an upper end.
    high = torch.linalg.matrix_norm(Z) / torch.linalg.matrix_norm(M)
    U, enough = at(high)
    while not bool(enough.all()):
        low = torch.where(enough, low, high)
        high = torch.where(enough, high, 2 * high)
        U, enough = at(high)
    for _ in range(bisections):
        middle = (low + high) / 2
        candidate, enough = at(middle)
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
        U = torch.where(enough[:, None, None], candidate, U)
    return U


def _inner(X: Tensor, Y: Tensor) -> Tensor:
    return (X * Y).sum(dim=(-2, -1))
