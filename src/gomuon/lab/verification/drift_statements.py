"""The appendix: what a direction from cached maps is worth in the current ball."""

from __future__ import annotations

import torch
from torch import Tensor

from gomuon.functional import frobenius_graft, matched_direction, theory, weighted_norm
from gomuon.lab.verification.adversary import Case
from gomuon.lab.verification.statement import Statement, always, at_most, inner
from gomuon.lab.verification.unknowns import FactorMatrix, PositiveDefinite, SourceMatrix

SOURCES = (SourceMatrix(2, 2), SourceMatrix(3, 2), SourceMatrix(2, 4), SourceMatrix(3, 3, rank=1))
DRIFT = 2.0  # decades of each of the four maps; then Θ reaches 1e8


def efficiency(D: Tensor, M: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """⟨M, D⟩/(q_P(D)‖P_B M P_A‖_*): D's share of the optimum of a ball, at its own radius."""
    return inner(M, D) / (weighted_norm(D, left, right) * theory.oracle_value(M, left, right))


def cached_oracle(
    M: Tensor,
    left: PositiveDefinite,
    right: PositiveDefinite,
    cached_left: PositiveDefinite,
    cached_right: PositiveDefinite,
) -> Tensor:
    """The share is at least 1/Θ, and at most 1; also after the graft."""
    current, cached = (left.power(1), right.power(1)), (cached_left.power(1), cached_right.power(1))
    bound = theory.cached_efficiency_bound(*current, *cached)
    share = efficiency(frobenius_graft(matched_direction(M, *cached)), M, *current)
    return torch.minimum(at_most(bound, share), 1 - share)


DRIFTS = (
    Statement(
        "cached oracle under drift",
        "Prop. 7",
        "1/Θ ≤ ⟨M, D̃⟩/(q_P(D̃)‖P_B M P_A‖_*) ≤ 1 with Θ = κ₂(P_B⁻¹P̃_B)κ₂(P_A⁻¹P̃_A)",
        always(
            *(
                Case((s, *(FactorMatrix(d, DRIFT) for d in (s.m, s.n, s.m, s.n))), cached_oracle)
                for s in SOURCES
            )
        ),
        allowed=1e-7,
    ),
)
