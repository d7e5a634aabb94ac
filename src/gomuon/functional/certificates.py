"""What a step is worth by the paper's statements, measured: Theorem 1, Propositions 5 and 7.

All functions take a batch of matrices [b, m, n]. Maps are [b, …] in any of the three forms of
`block_diagonal.py`; None stands for the identity. Where a device decomposes slowly, all of this is
products, and nothing waits for the device.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from gomuon.functional.block_diagonal import fill_padding_
from gomuon.functional.linalg import is_diagonal
from gomuon.functional.oracle import preconditioned
from gomuon.functional.polar_factor import PolarMethod, polar
from gomuon.functional.spectra import (
    eigenvalue_range,
    inverse_and_spectrum,
    mapped_norm_and_rank,
    nuclear_norm_and_rank,
    operator_norm,
)

Maps = tuple[Tensor | None, Tensor | None]  # P_B and P_A

_AT_THE_LIMIT = 0.99  # an eigenvalue of a map within 1 % of the largest possible one is there


class MapSpectrum(NamedTuple):
    """The spectrum of a map.

    Attributes:
        inverse: P⁻¹ in P's form.
        condition: κ₂(P), [b].
        raised: how many eigenvalues of the factor the floor had raised, [b]: those of P that are as
            large as the floor allows.
    """

    inverse: Tensor
    condition: Tensor
    raised: Tensor


class OracleShare(NamedTuple):
    """What a direction reaches of the optimum of Theorem 1.

    Attributes:
        value: ‖C‖_* with C = P_B M P_A, Equation (3) at ρ = 1, [b].
        radius: q_P(D), Equation (2), [b].
        rank: the numerical rank of C, [b].
        spread: its effective rank ‖C‖_*²/‖C‖_F², [b].
    """

    value: Tensor
    radius: Tensor
    rank: Tensor
    spread: Tensor


def map_spectrum(P: Tensor, power: float) -> MapSpectrum:
    """Of a map P = S^(−power) [b, …]."""
    size = max(P.shape[-2:])
    # The floor of the factor is d·ε·λ_max, so no map's eigenvalue is larger than this times the
    # smallest one; see `functional/factors.py`.
    limit = (size * torch.finfo(P.dtype).eps) ** -power * _AT_THE_LIMIT
    if is_diagonal(P):
        values = P.flatten(1)
        smallest, largest = values.amin(1), values.amax(1)
        raised = (values >= limit * values.amin(1, keepdim=True)).sum(1)
        return MapSpectrum(P.reciprocal(), largest / smallest, raised)
    inverse, smallest, largest, raised = inverse_and_spectrum(P, limit)
    if P.ndim == 4:  # in blocks, each with a floor of its own
        smallest, largest, raised = smallest.amin(1), largest.amax(1), raised.sum(1)
    return MapSpectrum(inverse, largest / smallest, raised)


def distortion(inverse: Tensor, cached: Tensor, d: int) -> Tensor:
    """κ₂(P⁻¹P̃), one side's part of Θ, Equation (7), [b].

    Args:
        inverse: P⁻¹ [b, …] of the current map.
        cached: P̃ [b, …] in the same form.
        d: the length of the side.
    """
    if is_diagonal(cached):
        values = (inverse * cached).flatten(1)
        return values.amax(1) / values.amin(1)
    L = inverse @ cached
    gram = L @ L.mT
    if gram.ndim == 4:
        gram = fill_padding_(gram, d)
    smallest, largest = eigenvalue_range((gram + gram.mT) / 2)
    if gram.ndim == 4:
        smallest, largest = smallest.amin(1), largest.amax(1)
    return (largest / smallest.clamp_min(torch.finfo(gram.dtype).tiny)).sqrt()


def oracle_share(M: Tensor, D: Tensor, maps: Maps, inverses: Maps) -> OracleShare:
    """What D, of any length, reaches of the optimum for the source M.

    The duality gap is q_P(D)·‖C‖_* − ⟨M, D⟩ ≥ 0, and zero for the matched direction (Theorem 1).
    """
    C = preconditioned(M, *maps)  # (2)
    value, rank = mapped_norm_and_rank(C, M, *maps)  # (3)
    radius = operator_norm(preconditioned(D, *inverses))
    return OracleShare(value, radius, rank, _effective(value, C))


def cached_efficiency(
    M: Tensor, cached: Maps, inverses: Maps, value: Tensor, method: PolarMethod
) -> Tensor:
    """⟨M, D̃⟩/(q_P(D̃)‖P_B M P_A‖_*), the left side of Equation (36), [b] (Proposition 7).

    Args:
        M: the source.
        cached: P̃_B and P̃_A, whose direction D̃ is.
        inverses: of the current maps.
        value: ‖P_B M P_A‖_*.
        method: how polar factors are computed.
    """
    D = preconditioned(polar(preconditioned(M, *cached), method), *cached)
    radius = operator_norm(preconditioned(D, *inverses))
    return (M * D).sum(dim=(-2, -1)) / (radius * value)


def effective_rank(X: Tensor) -> Tensor:
    """‖X‖_*²/‖X‖_F², [b]: r for r equal singular values, and never above min(m, n)."""
    return _effective(nuclear_norm_and_rank(X)[0], X)


def _effective(nuclear: Tensor, X: Tensor) -> Tensor:
    return (nuclear / torch.linalg.matrix_norm(X)).square()
