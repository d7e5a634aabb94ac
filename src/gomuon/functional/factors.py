"""From a second moment to a map: OAS, Equations (17)–(18), and inverse roots, Equation (29)."""

import torch
from torch import Tensor

from gomuon.functional.linalg import (
    decompose,
    guarded,
    is_diagonal,
    over_batch,
    symmetric_product,
)


def oas(S: Tensor, n: int | float | Tensor) -> tuple[Tensor, Tensor]:
    """OAS(S) and its intensity λ(S, n) for S [..., d, d] built from n samples.

    See `gomuon.functional.oas`.
    """
    d = S.shape[-1]
    # λ does not depend on the scale of S; dividing it out keeps the squares below in range.
    scale = _mean_eigenvalue(S)
    T = S / torch.where(scale > 0, scale, 1)[..., None, None]
    trace = T.diagonal(dim1=-2, dim2=-1).sum(-1)
    square = torch.linalg.matrix_norm(T).square()  # tr(S²) for symmetric S
    # tr(S²) − tr(S)²/d, written as ‖S − tr(S)/d·I‖² so that it cannot cancel below zero.
    dispersion = torch.linalg.matrix_norm(_plus_identity(T, -trace / d)).square()
    numerator = (1 - 2 / d) * square + trace.square()
    denominator = (n + 1 - 2 / d) * dispersion
    # Equation (17).
    intensity = torch.where(denominator > 0, numerator / denominator, 1.0).clamp(0, 1).to(S.dtype)
    return shrink(S, intensity), intensity  # (18)


def shrink(S: Tensor, intensity: float | Tensor) -> Tensor:
    """(1−λ)S + λ·tr(S)/d·I, Equation (18), for a given intensity λ."""
    weight = torch.as_tensor(intensity, dtype=S.dtype, device=S.device)
    return _plus_identity((1 - weight)[..., None, None] * S, weight * _mean_eigenvalue(S))


def _mean_eigenvalue(S: Tensor) -> Tensor:
    return S.diagonal(dim1=-2, dim2=-1).mean(-1)


def _plus_identity(S: Tensor, value: Tensor) -> Tensor:
    """S + value·I; only the diagonal of a copy is written."""
    diagonal = S.diagonal(dim1=-2, dim2=-1) + value[..., None]
    return torch.diagonal_scatter(S, diagonal, dim1=-2, dim2=-1)


def inverse_root(S: Tensor, power: float) -> Tensor:
    """S^(−power) with eigenvalues floored at roundoff scale; power ¼: the maps of Equation (29).

    See `gomuon.functional.inverse_root`. A diagonal gives a diagonal.
    """
    if is_diagonal(S):
        return _diagonal_root(S, power)
    return over_batch(lambda part: (_inverse_root(part, power),), S)[0]


def _inverse_root(S: Tensor, power: float) -> Tensor:
    eigenvalues, V = decompose(torch.linalg.eigh, S)
    largest = eigenvalues[..., -1:]
    # Rounding errors are as large as d·ε·λ_max, so smaller eigenvalues have no correct digits.
    limits = torch.finfo(S.dtype)
    floor = (largest * S.shape[-1] * limits.eps).clamp_min(limits.tiny)
    floored = torch.where(largest > 0, eigenvalues.clamp_min(floor), 1.0)
    # Halving the power gives V·f·(V·f)ᵀ, symmetric up to the order of its sums.
    half = V * floored.pow(-power / 2).unsqueeze(-2)
    return symmetric_product(half.mT)  # (29)


def _diagonal_root(S: Tensor, power: float) -> Tensor:
    """S^(−power) of diagonals [..., d, 1] or [..., 1, d], with the floor of `_inverse_root`."""
    largest = S.amax(dim=(-2, -1), keepdim=True)
    limits = torch.finfo(S.dtype)
    floor = (largest * max(S.shape[-2:]) * limits.eps).clamp_min(limits.tiny)
    return torch.where(largest > 0, S.clamp_min(floor), 1.0).pow(-power)


def guarded_roots(S: Tensor, power: float) -> list[Tensor | None]:
    """S^(−power) of each factor of a batch; None where it cannot be computed."""
    return guarded(lambda factors: inverse_root(factors, power), S)
