"""Inverse roots, Equation (29), by eigendecomposition or by products."""

from typing import Literal

import torch
from torch import Tensor

from gomuon.functional import linalg
from gomuon.functional.linalg import (
    decompose,
    full_float32,
    is_diagonal,
    over_batch,
    symmetric_product,
)
from gomuon.functional.product_roots import product_root

RootMethod = Literal["eigh", "products", "auto"]


def takes_products(method: RootMethod, device: torch.device) -> bool:
    """Whether roots are taken by products; "auto" decides by the device."""
    # On the CPU "auto" decomposes at every size. At the sides 16, 32, …, 2048, inverse fourth roots
    # of float32 matrices by products take 1.2, .8, 1.1, 1.8, 2.4, 3.4, 3.8 and 4.6 times as long as
    # by eigh: processor time of one thread, interleaved (AVX-512, MKL).
    return method == "products" or (method == "auto" and not linalg.decomposes_well(device))


def shift_of(max_condition: float | None) -> float:
    """The share of λ_max to add to every eigenvalue, so that the condition number is no larger."""
    return 0.0 if max_condition is None else 1 / (float(max_condition) - 1)


def inverse_root(
    S: Tensor, power: float, method: RootMethod = "eigh", shift: float = 0.0
) -> Tensor:
    """(S + shift·λ_max·I)^(−power); see `gomuon.functional.inverse_root`.

    Power ¼ gives the maps of Equation (29).
    """
    if is_diagonal(S) or not takes_products(method, S.device):
        return decomposed_root(S, power, shift)
    with full_float32():
        roots, fine = over_batch(lambda part: product_root(part, power, shift), S)
    if not bool(fine.all()):
        roots[~fine] = decomposed_root(S[~fine], power, shift)
    return roots


# ---- by eigendecomposition -----------------------------------------------------------------------


def decomposed_root(S: Tensor, power: float, shift: float = 0.0) -> Tensor:
    """(S + shift·λ_max·I)^(−power) with eigenvalues floored at roundoff scale.

    A diagonal gives a diagonal.
    """
    if is_diagonal(S):
        return _diagonal_root(S, power, shift)
    return over_batch(lambda part: (_decomposed_root(part, power, shift),), S)[0]


def _decomposed_root(S: Tensor, power: float, shift: float) -> Tensor:
    eigenvalues, V = decompose(torch.linalg.eigh, S)
    largest = eigenvalues[..., -1:]
    # Rounding errors are as large as d·ε·λ_max, so smaller eigenvalues have no correct digits.
    limits = torch.finfo(S.dtype)
    floor = (largest * S.shape[-1] * limits.eps).clamp_min(limits.tiny)
    if shift:
        eigenvalues = eigenvalues.clamp_min(0) + shift * largest
    floored = torch.where(largest > 0, eigenvalues.clamp_min(floor), 1.0)
    return inverse_power(floored, V, power)  # (29)


def _diagonal_root(S: Tensor, power: float, shift: float) -> Tensor:
    """Of diagonals [..., d, 1] or [..., 1, d], with the floor of `_decomposed_root`."""
    largest = S.amax(dim=(-2, -1), keepdim=True)
    limits = torch.finfo(S.dtype)
    floor = (largest * max(S.shape[-2:]) * limits.eps).clamp_min(limits.tiny)
    values = S.clamp_min(0) + shift * largest if shift else S
    return torch.where(largest > 0, values.clamp_min(floor), 1.0).pow(-power)


def inverse_power(values: Tensor, V: Tensor, power: float) -> Tensor:
    """V diag(values^−power) Vᵀ."""
    # Halving the power gives V·f·(V·f)ᵀ, symmetric up to the order of its sums.
    half = V * values.pow(-power / 2).unsqueeze(-2)
    return symmetric_product(half.mT)
