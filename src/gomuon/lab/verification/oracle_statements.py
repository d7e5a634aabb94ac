"""Section 2: the matched oracle, cached maps, and why the map back matters."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from gomuon.functional import (
    frobenius_graft,
    inside_only_direction,
    inverse_root,
    matched_direction,
    polar,
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
    nuclear,
    operator,
    sometimes,
)
from gomuon.lab.verification.unknowns import (
    FactorMatrix,
    Fixed,
    Numbers,
    PositiveDefinite,
    SourceMatrix,
)

SOURCES = (
    SourceMatrix(4, 3),
    SourceMatrix(2, 4),
    SourceMatrix(3, 3, decades=8.0),
    SourceMatrix(4, 4, rank=2),
    SourceMatrix(3, 5, rank=1),
)
METHODS: tuple[PolarMethod, ...] = ("svd", "canonical")  # the two completions of the null space
COUNTEREXAMPLE = ((-1.0, -4.0), (-2.0, -6.0))  # M of Section 2.2
COUNTEREXAMPLE_FACTOR = (1 / 9, 9.0)  # the diagonal of A and of B there
ILL_CONDITIONED = 1e-6  # rounding grows with κ₂(P_B)κ₂(P_A), which reaches 1e8
TURNED = 0.25  # an inside-only direction at a cosine below −this is a clear example

Maps = PositiveDefinite


def _of_every_source(slack: Callable[..., Tensor]) -> list[Case]:
    """Any positive definite maps will do: the oracle does not ask what they are roots of."""
    return [
        Case((source, FactorMatrix(source.m), FactorMatrix(source.n)), partial(slack, method))
        for source in SOURCES
        for method in METHODS
    ]


def muon_value(method: PolarMethod, M: Tensor) -> Tensor:
    """⟨M, polar(M)⟩ = ‖M‖_* and ‖polar(M)‖_op = 1, Equation (1)."""
    D = polar(M, method)
    value = equal(inner(M, D), nuclear(M), nuclear(M))
    return torch.minimum(value, equal(operator(D), torch.ones_like(value), 1))


def oracle_value(method: PolarMethod, M: Tensor, left: Maps, right: Maps) -> Tensor:
    """⟨M, D₀⟩ = ‖C‖_*; rounding is relative to ‖P_B‖·‖M‖_*·‖P_A‖."""
    P_B, P_A = left.power(1), right.power(1)
    D = matched_direction(M, P_B, P_A, polar_method=method)
    scale = left.norm * nuclear(M) * right.norm
    return equal(inner(M, D), theory.oracle_value(M, P_B, P_A), scale)


def oracle_radius(method: PolarMethod, M: Tensor, left: Maps, right: Maps) -> Tensor:
    """q_P(D₀) = 1; rounding is relative to κ₂(P_B)κ₂(P_A)."""
    P_B, P_A = left.power(1), right.power(1)
    radius = weighted_norm(matched_direction(M, P_B, P_A, polar_method=method), P_B, P_A)
    return equal(radius, torch.ones_like(radius), left.condition * right.condition)


def feasible_rival(M: Tensor, left: Maps, right: Maps, near: Tensor, other: Tensor) -> Tensor:
    """⟨M, D⟩ ≤ ⟨M, D₀⟩ for D = P_B U P_A with ‖U‖_op ≤ 1.

    U is any matrix, or one near Q(C), so that the search also looks around the optimum.
    """
    P_B, P_A = left.power(1), right.power(1)
    V, _, Wh = torch.linalg.svd(P_B @ M @ P_A, full_matrices=False)
    U = other + 10 * near * (V @ Wh)
    U = U / operator(U)[:, None, None]
    best = inner(M, matched_direction(M, P_B, P_A))
    return at_most(inner(M, P_B @ U @ P_A), best)


def zero_source(left: Maps, right: Maps) -> Tensor:
    """D₀ = 0 for M = 0, and no graft stretches it."""
    M = torch.zeros_like(left.V[..., :, :1] @ right.V[..., :1, :])
    D = frobenius_graft(matched_direction(M, left.power(1), right.power(1)))
    return -frobenius(D)


def cached_alignment(method: PolarMethod, M: Tensor, left: Maps, right: Maps) -> Tensor:
    """⟨M, D̃⟩ ≥ σ_min(P̃_B)σ_min(P̃_A)‖M‖_* > 0: the positivity of Corollary 2, with a margin."""
    D = matched_direction(M, left.power(1), right.power(1), polar_method=method)
    least = left.values.amin(-1) * nuclear(M) * right.values.amin(-1)
    return inner(M, D) / least - 1


def _counterexample(device: torch.device) -> tuple[Tensor, Tensor]:
    """M and B^(−1/2) = A^(−1/2)."""
    M = torch.tensor(COUNTEREXAMPLE, dtype=torch.float64, device=device)
    factor = torch.diag(torch.tensor(COUNTEREXAMPLE_FACTOR, dtype=torch.float64, device=device))
    return M, inverse_root(factor, 1 / 2)


def inside_only_value(point: Tensor) -> Tensor:
    """polar(Z) is the printed matrix, and ⟨M, polar(Z)⟩ = −17/√949."""
    M, root = _counterexample(point.device)
    D = inside_only_direction(M, root, root)
    printed = M.new_tensor([[-25, -18], [-18, 25]]) / math.sqrt(949)
    value = -17 / math.sqrt(949)
    return -torch.stack([(D - printed).abs().amax(), (inner(M, D) - value).abs()]).amax()[None]


def matched_value(point: Tensor) -> Tensor:
    """⟨M, D₀⟩ = ‖Z‖_* = √949/3: of a 2×2 matrix ‖Z‖_*² = ‖Z‖_F² + 2|det Z|."""
    M, root = _counterexample(point.device)
    return -(inner(M, matched_direction(M, root, root)) * 3 / math.sqrt(949) - 1).abs()[None]


def inside_only_turns(M: Tensor, left: Maps, right: Maps) -> Tensor:
    """The cosine between M and polar(P_B M P_A) may be negative."""
    D = inside_only_direction(M, left.power(1), right.power(1))
    return -inner(M, D) / (frobenius(M) * frobenius(D)) - TURNED


ORACLE = (
    Statement(
        "Muon's value ‖M‖_*",
        "Eq. (1)",
        "⟨M, polar(M)⟩ = ‖M‖_* and ‖polar(M)‖_op = 1",
        always(*(Case((s,), partial(muon_value, how)) for s in SOURCES for how in METHODS)),
    ),
    Statement(
        "matched oracle",
        "Theorem 1",
        "⟨M, D₀⟩ = ‖P_B M P_A‖_* for D₀ = P_B polar(P_B M P_A) P_A",
        always(*_of_every_source(oracle_value)),
    ),
    Statement(
        "oracle on the unit sphere",
        "Theorem 1",
        "q_P(D₀) = ‖P_B⁻¹ D₀ P_A⁻¹‖_op = 1",
        always(*_of_every_source(oracle_radius)),
    ),
    Statement(
        "nothing feasible does better",
        "Theorem 1",
        "⟨M, D⟩ ≤ ⟨M, D₀⟩ for every D with q_P(D) ≤ 1",
        always(
            *(
                Case(
                    (s, FactorMatrix(s.m), FactorMatrix(s.n), Numbers((1, 1)), Numbers((s.m, s.n))),
                    feasible_rival,
                )
                for s in SOURCES
            )
        ),
        allowed=ILL_CONDITIONED,
    ),
    Statement(
        "zero source, zero direction",
        "Sec. 2.1",
        "D₀ = 0 for M = 0, also after the graft",
        always(Case((FactorMatrix(3), FactorMatrix(4)), zero_source)),
        allowed=0.0,
    ),
    Statement(
        "cached geometry",
        "Cor. 2",
        "⟨M, D̃⟩ ≥ σ_min(P̃_B)σ_min(P̃_A)‖M‖_* > 0 for any cached maps",
        always(*_of_every_source(cached_alignment)),
        allowed=ILL_CONDITIONED,
    ),
    Statement(
        "inside only: −17/√949",
        "Eq. (8)",
        "⟨M, polar(Z)⟩ = −17/√949 at the paper's M, A and B",
        always(Case((Fixed(),), inside_only_value)),
        allowed=1e-12,
    ),
    Statement(
        "matched there: √949/3",
        "Sec. 2.2",
        "⟨M, D₀⟩ = √949/3 at the same M, A and B",
        always(Case((Fixed(),), matched_value)),
        allowed=1e-12,
    ),
    Statement(
        "inside only may turn away",
        "Sec. 2.2",
        f"the cosine between M and polar(P_B M P_A) falls below −{TURNED}",
        sometimes(Case((SourceMatrix(2, 2), FactorMatrix(2), FactorMatrix(2)), inside_only_turns)),
    ),
)
