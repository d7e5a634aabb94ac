"""Shrinkage of a second moment towards a multiple of the identity."""

import torch
from torch import Tensor

from gomuon.functional import checks


def oas(S: Tensor, n: int | float | Tensor) -> tuple[Tensor, Tensor]:
    """Oracle Approximating Shrinkage, Equations (17)–(18) (Chen et al. 2010).

    Args:
        S: [..., d, d] symmetric second moments.
        n: samples each was built from; a number, or a tensor that broadcasts over [...].

    Returns:
        (1−λ)S + λ·tr(S)/d·I and the intensity λ, [...]. Where the denominator vanishes (d = 1,
        S = 0, a multiple of the identity) every λ gives S back, and λ = 1.

    Raises:
        TypeError: S is not a tensor, or n not a number.
        ValueError: S is not square or empty, or n is a number below 1 or does not broadcast.
    """
    checks.square(S, "S")
    checks.not_empty(S, "S")
    checks.weights(n, S, "n must be the number of samples, n >= 1, or a tensor of them", 1)
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
    intensity = torch.where(denominator > 0, numerator / denominator, 1.0).clamp(0, 1).to(S.dtype)
    return _shrunk(S, intensity), intensity


def shrink(S: Tensor, intensity: float | Tensor) -> Tensor:
    """(1−λ)S + λ·tr(S)/d·I for intensity λ, a number or a tensor that broadcasts over [...].

    Raises:
        TypeError: S is not a tensor, or intensity not a number.
        ValueError: S is not square, or intensity is not finite or does not broadcast.
    """
    checks.square(S, "S")
    checks.weights(intensity, S, "intensity must be a finite number, or a tensor of them")
    return _shrunk(S, intensity)


def _shrunk(S: Tensor, intensity: float | Tensor) -> Tensor:
    weight = torch.as_tensor(intensity, dtype=S.dtype, device=S.device)
    return _plus_identity((1 - weight)[..., None, None] * S, weight * _mean_eigenvalue(S))


def _mean_eigenvalue(S: Tensor) -> Tensor:
    return S.diagonal(dim1=-2, dim2=-1).mean(-1)


def _plus_identity(S: Tensor, value: Tensor) -> Tensor:
    """S + value·I, touching nothing but the diagonal of a copy."""
    diagonal = S.diagonal(dim1=-2, dim2=-1) + value[..., None]
    return torch.diagonal_scatter(S, diagonal, dim1=-2, dim2=-1)
