"""For every statement, something broken that its search must notice.

Bounds get a constant that is a little too good, identities a formula that is a little wrong, and
where the paper says that something may happen, it is made impossible.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import gomuon
from gomuon.functional import (
    inside_only_direction,
    inverse_root,
    matched_direction,
    polar,
    shrink,
    theory,
)
from gomuon.lab.verification import (
    factor_statements,
    graft_statements,
    label_statements,
    oracle_statements,
    package_statements,
)


@dataclass(frozen=True)
class Broken:
    """What replaces a name of a module."""

    module: ModuleType
    name: str
    instead: Any


def times(factor: float, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose result is a little different."""
    return lambda *args, **options: factor * function(*args, **options)


def inside_only(M: Tensor, left: Tensor, right: Tensor, **options: Any) -> Tensor:
    return inside_only_direction(M, left, right, **options)


def without_right(M: Tensor, left: Tensor, right: Tensor, **options: Any) -> Tensor:
    return left @ inside_only_direction(M, left, right, **options)


def without_left(M: Tensor, left: Tensor, right: Tensor, **options: Any) -> Tensor:
    return inside_only_direction(M, left, right, **options) @ right


def canonical(M: Tensor, left: Tensor, right: Tensor, **options: Any) -> Tensor:
    return matched_direction(M, left, right, polar_method="canonical")


def of_signs(M: Tensor, left: Tensor, right: Tensor, **options: Any) -> Tensor:
    return left @ M.sign() @ right


def no_root(S: Tensor, power: float) -> Tensor:
    return torch.eye(S.shape[-1], dtype=S.dtype).expand_as(S)


def half_root(S: Tensor, power: float) -> Tensor:
    return inverse_root(S, 1 / 2)


def one_outer(q: Tensor, p: Tensor) -> Tensor:
    r = q - p
    return torch.diag_embed(r) - 2 * p.unsqueeze(-1) * r.unsqueeze(-2)


def without_sampling(estimated: Tensor, q: Tensor, p: Tensor, J: Tensor) -> Tensor:
    return theory.observed_label_mismatch_bound(q, p, J)


def three_terms(*factors: Tensor) -> Tensor:
    terms = FACTOR_ERROR_TERMS(*factors)
    return terms * terms.new_tensor([1, 1, 1, 0])


def quieter(autocovariances: Tensor, beta: float, every: int = 1) -> Tensor:
    return EMA_COVARIANCE(autocovariances, beta, every) / every


FACTOR_ERROR_TERMS, EMA_COVARIANCE = theory.factor_error_terms, theory.ema_covariance
NOISE_GAIN, LAG = theory.sparse_noise_gain, theory.sparse_lag


class WrongDecay(gomuon.GoMuon):
    """Go-MUON that averages B a little faster."""

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["factor_decay"] = 0.96
        return super().step(closure)


BROKEN: dict[str, Broken] = {
    "Muon's value ‖M‖_*": Broken(
        oracle_statements, "polar", lambda X, method: X / X.norm(dim=(-2, -1), keepdim=True)
    ),
    "matched oracle": Broken(oracle_statements, "matched_direction", without_right),
    "oracle on the unit sphere": Broken(
        oracle_statements, "matched_direction", times(1.001, matched_direction)
    ),
    "nothing feasible does better": Broken(
        oracle_statements, "matched_direction", times(0.999, matched_direction)
    ),
    "zero source, zero direction": Broken(
        oracle_statements, "matched_direction", lambda M, left, right: M + 1
    ),
    "cached geometry": Broken(oracle_statements, "matched_direction", inside_only),
    "inside only: −17/√949": Broken(oracle_statements, "inside_only_direction", matched_direction),
    "matched there: √949/3": Broken(oracle_statements, "matched_direction", inside_only),
    "inside only may turn away": Broken(
        oracle_statements, "inside_only_direction", matched_direction
    ),
    "softmax Fisher factor": Broken(theory, "softmax_fisher", torch.diag_embed),
    "softmax Fisher may vanish": Broken(theory, "softmax_fisher", torch.diag_embed),
    "observed-label mismatch": Broken(theory, "observed_label_mismatch", one_outer),
    "mismatch ≤ 3‖q − p‖": Broken(
        theory,
        "observed_label_mismatch_bound",
        times(1.4 / 3, theory.observed_label_mismatch_bound),
    ),
    "hidden layer ≤ 3‖J‖²‖q − p‖": Broken(
        theory,
        "observed_label_mismatch_bound",
        times(1.4 / 3, theory.observed_label_mismatch_bound),
    ),
    "factor consistency": Broken(theory, "observed_factor_error_bound", without_sampling),
    "K-FAC's product is not exact": Broken(label_statements, "FAR", 10.0),
    "root-Fisher norm": Broken(theory, "root_fisher_norm", times(1.01, theory.root_fisher_norm)),
    "grafted alignment": Broken(
        theory, "grafted_alignment_bound", times(1.01, theory.grafted_alignment_bound)
    ),
    "grafted conditioning": Broken(
        theory, "grafted_condition_bound", times(0.99, theory.grafted_condition_bound)
    ),
    "graft keeps the ray": Broken(
        graft_statements, "frobenius_graft", lambda D: D / D.norm(dim=(-2, -1), keepdim=True)
    ),
    "no order of α = 0 and α = ¼": Broken(graft_statements, "inverse_root", no_root),
    "scalar invariance": Broken(graft_statements, "frobenius_graft", lambda D: D),
    "orthogonal equivariance": Broken(graft_statements, "matched_direction", of_signs),
    "completion may break it": Broken(graft_statements, "matched_direction", canonical),
    "congruences may break it": Broken(graft_statements, "inverse_root", half_root),
    "OAS as printed": Broken(
        factor_statements, "oas", lambda S, n: (shrink(S, 0.5), torch.full_like(S[..., 0, 0], 0.5))
    ),
    "condition number after OAS": Broken(
        theory, "oas_condition_bound", times(0.99, theory.oas_condition_bound)
    ),
    "four parts of factor error": Broken(theory, "factor_error_terms", three_terms),
    "root maps": Broken(factor_statements, "inverse_root", half_root),
    "covariance dominance": Broken(theory, "ema_covariance", quieter),
    "dominance at every frequency": Broken(
        theory, "sparse_noise_gain", lambda beta, K, w: 1 / NOISE_GAIN(beta, K, w)
    ),
    "variance for IID": Broken(theory, "ema_variance", lambda beta, K: (1 - beta) / (1 + beta)),
    "lag on an affine signal": Broken(
        theory, "sparse_lag", lambda beta, K: LAG(beta, K) - (K - 1) / 2
    ),
    "variance ratio 3.99537": Broken(theory, "sparse_variance_ratio", lambda beta, K: K),
    "lag 32.3714": Broken(theory, "sparse_lag", lambda beta, K: LAG(beta, K) + 1e-4),
    "lag 32.3333": Broken(theory, "sparse_lag", lambda beta, K: LAG(beta, K) + 1e-4),
    "cached oracle under drift": Broken(
        theory, "cached_efficiency_bound", times(1.05, theory.cached_efficiency_bound)
    ),
    "complete update": Broken(package_statements, "GoMuon", WrongDecay),
    "exact polar in float32": Broken(
        package_statements, "polar", lambda X, method: polar(X, "fast")
    ),
}
