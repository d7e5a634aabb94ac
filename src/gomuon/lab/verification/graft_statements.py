"""Section 3.2: quarter powers, the graft, and what the grafted direction does not depend on."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from gomuon.functional import (
    frobenius_graft,
    inverse_root,
    matched_direction,
    theory,
    weighted_norm,
)
from gomuon.functional.polar_factor import PolarMethod
from gomuon.lab.verification.adversary import Case
from gomuon.lab.verification.statement import (
    Statement,
    always,
    at_most,
    equal,
    frobenius,
    inner,
    same_matrix,
    sometimes,
)
from gomuon.lab.verification.unknowns import (
    Between,
    FactorMatrix,
    Numbers,
    PositiveDefinite,
    Rotation,
    SourceMatrix,
    Unknown,
)

ALPHAS = (1 / 8, 1 / 4, 1 / 2)
SHAPES = ((3, 2), (2, 3))
SOURCES = (SourceMatrix(3, 2), SourceMatrix(2, 3), SourceMatrix(3, 3, rank=2))
TAME = 2.0  # decades of factors where a direction is compared with one computed otherwise
# Where the grafted direction is unique: at full rank, and with the canonical polar factor below it.
UNIQUE: tuple[tuple[SourceMatrix, PolarMethod], ...] = (
    (SourceMatrix(3, 2, decades=TAME), "svd"),
    (SourceMatrix(3, 3, decades=TAME), "svd"),
    (SourceMatrix(2, 4, rank=1), "canonical"),
    (SourceMatrix(4, 3, rank=2, decades=TAME), "canonical"),
)
BROKEN = 0.5  # a relative difference that nobody takes for rounding
CLEARLY = 0.05  # of alignments


def grafted(M: Tensor, A: Tensor, B: Tensor, alpha: float, method: PolarMethod = "svd") -> Tensor:
    """D̂_α, Equation (14), from the factors."""
    left, right = inverse_root(B, alpha), inverse_root(A, alpha)
    return frobenius_graft(matched_direction(M, left, right, polar_method=method))


def root_fisher(D: Tensor, A: PositiveDefinite, B: PositiveDefinite) -> Tensor:
    """vec(D)ᵀ(A^½ ⊗ B^½)vec(D) = ‖B^¼ D A^¼‖_F²."""
    vec = D.mT.flatten(1)  # stacks columns
    kron = torch.einsum("bij,bkl->bikjl", A.power(1 / 2), B.power(1 / 2))
    kron = kron.reshape(len(vec), vec.shape[1], -1)
    form = torch.einsum("bi,bij,bj->b", vec, kron, vec)
    square = theory.root_fisher_norm(D, A.power(1), B.power(1)).square()
    return equal(form, square, (A.norm * B.norm).sqrt() * frobenius(D).square())


def alignment(alpha: float, M: Tensor, B: PositiveDefinite, A: PositiveDefinite) -> Tensor:
    bound = theory.grafted_alignment_bound(A.power(1), B.power(1), M, alpha)
    return at_most(bound, inner(M, grafted(M, A.power(1), B.power(1), alpha)))


def conditioning(alpha: float, M: Tensor, B: PositiveDefinite, A: PositiveDefinite) -> Tensor:
    # The compact polar factor leaves k nonzero singular values at every rank of M.
    found = theory.condition_number(grafted(M, A.power(1), B.power(1), alpha))
    return at_most(found, theory.grafted_condition_bound(A.power(1), B.power(1), alpha))


def graft_ray(alpha: float, M: Tensor, B: PositiveDefinite, A: PositiveDefinite) -> Tensor:
    """⟨M, D̂⟩ = r‖C‖_* with r = √k/‖D₀‖_F, which is D̂'s weighted radius; and ‖D̂‖_F = √k."""
    left, right = B.power(-alpha), A.power(-alpha)
    D0 = matched_direction(M, left, right)
    D = frobenius_graft(D0)
    energy = math.sqrt(min(M.shape[-2:]))
    radius = energy / frobenius(D0)
    rounding = (A.condition * B.condition).pow(alpha)
    value = radius * theory.oracle_value(M, left, right)
    slacks = [
        equal(inner(M, D), value, value * rounding),
        equal(weighted_norm(D, left, right), radius, radius * rounding),
        equal(frobenius(D), torch.full_like(radius, energy), energy),
    ]
    return torch.stack(slacks).amin(0)


def scalar_invariance(
    method: PolarMethod,
    M: Tensor,
    B: PositiveDefinite,
    A: PositiveDefinite,
    a: Tensor,
    b: Tensor,
) -> Tensor:
    """D̂ is the same for any positive multiples of A and B."""
    plain = grafted(M, A.power(1), B.power(1), 1 / 4, method)
    scales = (torch.pow(10.0, x)[:, None, None] for x in (a, b))
    scaled_A, scaled_B = (s * S.power(1) for s, S in zip(scales, (A, B), strict=True))
    return same_matrix(grafted(M, scaled_A, scaled_B, 1 / 4, method), plain, frobenius(plain))


def equivariance(
    method: PolarMethod,
    M: Tensor,
    B: PositiveDefinite,
    A: PositiveDefinite,
    U: Tensor,
    V: Tensor,
) -> Tensor:
    """(UMVᵀ, UBUᵀ, VAVᵀ) gives UD̂Vᵀ."""
    return -turned_away(method, M, B, A, U, V)


def turned_away(
    method: PolarMethod,
    M: Tensor,
    B: PositiveDefinite,
    A: PositiveDefinite,
    U: Tensor,
    V: Tensor,
) -> Tensor:
    """‖D̂' − UD̂Vᵀ‖_F/‖D̂‖_F for a change of bases."""
    plain = grafted(M, A.power(1), B.power(1), 1 / 4, method)
    turned_A, turned_B = V @ A.power(1) @ V.mT, U @ B.power(1) @ U.mT
    found = grafted(U @ M @ V.mT, turned_A, turned_B, 1 / 4, method)
    return frobenius(found - U @ plain @ V.mT) / frobenius(plain)


def breaks_equivariance(
    M: Tensor, B: PositiveDefinite, A: PositiveDefinite, U: Tensor, V: Tensor
) -> Tensor:
    return turned_away("svd", M, B, A, U, V) - BROKEN


def breaks_under_congruence(
    M: Tensor, B: PositiveDefinite, A: PositiveDefinite, U: PositiveDefinite, V: PositiveDefinite
) -> Tensor:
    """x' = Vx and δ' = Uδ: W becomes U⁻ᵀWV⁻¹, and so would an invariant direction's ray."""
    T, S = U.power(1), V.power(1)
    plain = grafted(M, A.power(1), B.power(1), 1 / 4)
    found = grafted(T @ M @ S, S @ A.power(1) @ S, T @ B.power(1) @ T, 1 / 4)
    wanted = frobenius_graft(U.power(-1) @ plain @ V.power(-1))
    return frobenius(found - wanted) / frobenius(wanted) - BROKEN


def aligns_better(sign: int, M: Tensor, B: PositiveDefinite, A: PositiveDefinite) -> Tensor:
    """Of two directions of one energy, D̂_¼ may align more with M than Muon's, or less."""
    quarter = inner(M, grafted(M, A.power(1), B.power(1), 1 / 4))
    muon = inner(M, grafted(M, A.power(1), B.power(1), 0.0))
    return sign * (quarter - muon) / muon - CLEARLY


def _of_every_source(slack: Callable[..., Tensor]) -> list[Case]:
    return [
        Case((source, FactorMatrix(source.m), FactorMatrix(source.n)), partial(slack, alpha))
        for source in SOURCES
        for alpha in ALPHAS
    ]


def _of_unique_polar_factors(
    slack: Callable[..., Tensor], changes: Callable[[SourceMatrix], tuple[Unknown, Unknown]]
) -> list[Case]:
    return [
        Case(
            (s, FactorMatrix(s.m, TAME), FactorMatrix(s.n, TAME), *changes(s)),
            partial(slack, method),
        )
        for s, method in UNIQUE
    ]


def _multiples(source: SourceMatrix) -> tuple[Unknown, Unknown]:
    return Between(-6, 6), Between(-6, 6)


def _rotations(source: SourceMatrix) -> tuple[Unknown, Unknown]:
    return Rotation(source.m), Rotation(source.n)


GRAFT = (
    Statement(
        "root-Fisher norm",
        "Eq. (15)",
        "vec(D)ᵀ(A^½ ⊗ B^½)vec(D) = ‖B^¼ D A^¼‖_F²",
        always(
            *(
                Case((Numbers((m, n)), FactorMatrix(n), FactorMatrix(m)), root_fisher)
                for m, n in SHAPES
            )
        ),
    ),
    Statement(
        "grafted alignment",
        "Prop. 5",
        "⟨M, D̂_α⟩ ≥ K_AB^(−α)‖M‖_*",
        always(*_of_every_source(alignment)),
    ),
    Statement(
        "grafted conditioning",
        "Prop. 5",
        "κ₊(D̂_α) ≤ K_AB^α",
        always(*_of_every_source(conditioning)),
    ),
    Statement(
        "graft keeps the ray",
        "Sec. 3.2",
        "⟨M, D̂⟩ = √k‖C‖_*/‖D₀‖_F, q_P(D̂) = √k/‖D₀‖_F and ‖D̂‖_F = √k",
        always(*_of_every_source(graft_ray)),
    ),
    Statement(
        "no order of α = 0 and α = ¼",
        "Sec. 3.2",
        f"⟨M, D̂_¼⟩ may be above ⟨M, D̂_0⟩, and below, by more than {CLEARLY:g} of it",
        sometimes(
            *(
                Case(
                    (SourceMatrix(2, 2), FactorMatrix(2), FactorMatrix(2)),
                    partial(aligns_better, sign),
                )
                for sign in (1, -1)
            )
        ),
    ),
    Statement(
        "scalar invariance",
        "Sec. 3.2",
        "D̂ is the same for aA and bB, a, b > 0",
        always(*_of_unique_polar_factors(scalar_invariance, _multiples)),
    ),
    Statement(
        "orthogonal equivariance",
        "Sec. 3.2",
        "(UMVᵀ, UBUᵀ, VAVᵀ) gives UD̂Vᵀ, with the canonical polar factor or at full rank",
        always(*_of_unique_polar_factors(equivariance, _rotations)),
    ),
    Statement(
        "completion may break it",
        "Sec. 3.2",
        f"below full rank the full SVD's completion turns D̂ away by more than {BROKEN:g}",
        sometimes(
            Case(
                (
                    SourceMatrix(3, 3, rank=1),
                    FactorMatrix(3, TAME),
                    FactorMatrix(3, TAME),
                    Rotation(3),
                    Rotation(3),
                ),
                breaks_equivariance,
            )
        ),
    ),
    Statement(
        "congruences may break it",
        "Sec. 3.2",
        f"an affine change of coordinates turns D̂ away by more than {BROKEN:g}",
        sometimes(
            Case(
                (
                    SourceMatrix(2, 2),
                    FactorMatrix(2),
                    FactorMatrix(2),
                    FactorMatrix(2),
                    FactorMatrix(2),
                ),
                breaks_under_congruence,
            )
        ),
    ),
)
