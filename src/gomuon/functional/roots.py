"""Inverse matrix powers of symmetric positive semi-definite factors."""

import torch
from torch import Tensor

from gomuon.functional import checks
from gomuon.functional.linalg import decompose, over_batch
from gomuon.functional.products import symmetric_product


def inverse_root(S: Tensor, power: float) -> Tensor:
    """S^(−power) with eigenvalues floored at roundoff scale; power 1/4 gives the maps P_A, P_B.

    Args:
        S: [..., d, d] symmetric positive semi-definite, float32 or float64.
        power: at least 0; 0 gives the identity.

    Returns:
        [..., d, d] symmetric positive definite. The zero matrix, which has no scale of its own,
        gives the identity.

    Raises:
        TypeError: S is not a tensor, or power not a number.
        ValueError: S is not square or not float32 or float64, or power is negative.
        DecompositionError: the eigendecomposition failed, in float64 too.
    """
    checks.square(S, "S")
    checks.decomposable(S, "S")
    power = checks.number(power, "power must be a number, power >= 0", 0)
    return over_batch(lambda part: (_inverse_root(part, power),), S)[0]


def _inverse_root(S: Tensor, power: float) -> Tensor:
    eigenvalues, V = decompose(torch.linalg.eigh, S)
    largest = eigenvalues[..., -1:]
    # Eigenvalues below d·ε·λ_max are not distinguishable from zero: their true value is lost.
    limits = torch.finfo(S.dtype)
    floor = (largest * S.shape[-1] * limits.eps).clamp_min(limits.tiny)
    floored = torch.where(largest > 0, eigenvalues.clamp_min(floor), 1.0)
    # Halving the power gives V·f·(V·f)ᵀ, symmetric up to the order of its sums.
    half = V * floored.pow(-power / 2).unsqueeze(-2)
    return symmetric_product(half.mT)
