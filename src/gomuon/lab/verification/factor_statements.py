"""Section 3.3, and the root maps: shrinkage, its condition number, and where factor error is."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from gomuon.functional import inverse_root, oas, theory
from gomuon.lab.verification.adversary import Case
from gomuon.lab.verification.statement import (
    Statement,
    always,
    at_most,
    equal,
    frobenius,
    operator,
    same_matrix,
)
from gomuon.lab.verification.unknowns import (
    FactorMatrix,
    Numbers,
    PositiveDefinite,
    SourceMatrix,
    Whole,
)

# Rows [N, d] of a batch: more rows than dimensions, fewer, and one, which makes them singular.
BATCHES = (
    SourceMatrix(6, 3, decades=6.0),
    SourceMatrix(3, 5, decades=3.0),
    SourceMatrix(4, 4, rank=1),
    SourceMatrix(1, 2),
)
SAMPLES = 1000  # the largest N; the bound does not ask how S came about


def second_moment(rows: Tensor) -> Tensor:
    return rows.mT @ rows / rows.shape[-2]


def oas_formula(rows: Tensor, N: Tensor) -> Tensor:
    """λ and OAS(S), from the eigenvalues of S: tr(S²) − tr(S)²/d is their squared dispersion."""
    S = second_moment(rows)
    d = S.shape[-1]
    eigenvalues = torch.linalg.eigvalsh(S)
    mean = eigenvalues.mean(-1, keepdim=True)
    above = (1 - 2 / d) * eigenvalues.square().sum(-1) + (d * mean[:, 0]).square()
    dispersion = (eigenvalues - mean).square().sum(-1)
    intensity = (above / ((N + 1 - 2 / d) * dispersion)).clamp(0, 1)
    identity = torch.eye(d, dtype=S.dtype, device=S.device)
    weight = intensity[:, None, None]
    shrunk, found = oas(S, N)
    same = same_matrix(shrunk, (1 - weight) * S + weight * mean[:, None] * identity, frobenius(S))
    return torch.minimum(same, equal(found, intensity, 1))


def oas_condition(rows: Tensor, N: Tensor) -> Tensor:
    S = second_moment(rows)
    shrunk, intensity = oas(S, N)
    bound = torch.as_tensor(theory.oas_condition_bound(S.shape[-1], intensity))
    return at_most(theory.condition_number(shrunk), bound)


def factor_error(*matrices: Tensor) -> Tensor:
    """‖B̄^eff − B_F‖ is at most the sum of its four parts, for any symmetric matrices."""
    factors = [X + X.mT for X in matrices]
    parts = theory.factor_error_terms(*factors)
    return at_most(operator(factors[0] - factors[-1]), parts.sum(-1))


def root_map(power: float, A: PositiveDefinite) -> Tensor:
    """P^(1/power)·A = I for P = A^(−power)."""
    P = inverse_root(A.power(1), power)
    identity = torch.eye(A.values.shape[-1], dtype=P.dtype, device=P.device)
    raised = torch.linalg.matrix_power(P, round(1 / power))
    return same_matrix(raised @ A.power(1), identity.expand_as(P), A.condition)


FACTORS = (
    Statement(
        "OAS as printed",
        "Eq. (18)",
        "λ(S, N) and OAS(S) = (1 − λ)S + λ·tr(S)/d·I",
        always(*(Case((rows, Whole(SAMPLES)), oas_formula) for rows in BATCHES)),
    ),
    Statement(
        "condition number after OAS",
        "Eq. (19)",
        "κ₂(OAS(S)) ≤ (d − (d − 1)λ)/λ",
        always(*(Case((rows, Whole(SAMPLES)), oas_condition) for rows in BATCHES)),
    ),
    Statement(
        "four parts of factor error",
        "Eq. (20)",
        "‖B̄^eff − B_F‖ ≤ finite sample + model mismatch + shrinkage/floor + EMA and staleness",
        always(*(Case((Numbers((d, d)),) * 5, factor_error) for d in (1, 3))),
    ),
    Statement(
        "root maps",
        "Eq. (29)",
        "P⁴S = I for P = S^(−¼), P²S = I for P = S^(−½)",
        always(
            *(Case((FactorMatrix(4, 6.0),), partial(root_map, power)) for power in (1 / 4, 1 / 2))
        ),
    ),
)
