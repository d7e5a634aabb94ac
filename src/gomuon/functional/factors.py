"""Shrinkage of second moments: OAS, Equations (17)–(18)."""

import torch
from torch import Tensor


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
