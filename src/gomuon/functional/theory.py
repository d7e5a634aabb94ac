"""The paper's identities and bounds, each as a function of its quantities.

The tests use them as oracles. They also show how strong a guarantee is for given matrices.

All functions raise a TypeError for an argument of a wrong type, and a ValueError for an argument
that does not fit. Functions that decompose matrices raise a DecompositionError if that fails.
"""

import math

import torch
from torch import Tensor

from gomuon.functional import arguments
from gomuon.functional.linalg import attempt, decompose


def oracle_value(M: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """‖C‖_* with C = P_B M P_A: the value of Equation (3) at ρ = 1 (Theorem 1).

    ⟨M, D₀⟩ has this value, Equation (5).
    """
    arguments.square(left, "left")
    arguments.square(right, "right")
    M = arguments.sided(M, left, right)
    return attempt(torch.linalg.matrix_norm, left @ M @ right, ord="nuc")


def condition_number(S: Tensor) -> Tensor:
    """κ₂(S): the ratio of the largest to the smallest singular value."""
    arguments.matrix(S, "S")
    return _condition_number(S, "S")


def _condition_number(S: Tensor, name: str) -> Tensor:
    arguments.decomposable(S, name)
    arguments.not_empty(S, name)
    sigma = attempt(torch.linalg.svdvals, S)
    return sigma[..., 0] / sigma[..., -1]


def grafted_alignment_bound(A: Tensor, B: Tensor, M: Tensor, alpha: float) -> Tensor:
    """⟨M, D̂_α⟩ ≥ K_AB^(−α)·‖M‖_*, K_AB = κ₂(A)κ₂(B): half of Equation (16) (Proposition 5)."""
    kept = grafted_condition_bound(A, B, alpha).reciprocal()
    arguments.sided(M, B, A, ("M", "B", "A"))
    return kept * attempt(torch.linalg.matrix_norm, M, ord="nuc")


def grafted_condition_bound(A: Tensor, B: Tensor, alpha: float) -> Tensor:
    """κ₊(D̂_α) ≤ K_AB^α: the other half of Equation (16) (Proposition 5)."""
    arguments.square(A, "A")
    arguments.square(B, "B")
    arguments.same_dtype_and_device(B, "B", A, "A")
    arguments.broadcast_shape(B.shape[:-2], "B", A.shape[:-2], "A")
    alpha = float(arguments.number(alpha, "alpha must be a finite number"))
    return (_condition_number(A, "A") * _condition_number(B, "B")).pow(alpha)


def root_fisher_norm(D: Tensor, A: Tensor, B: Tensor) -> Tensor:
    """‖B^¼ D A^¼‖_F, whose square is vec(D)ᵀ(A^½ ⊗ B^½)vec(D), Equation (15).

    The length of D in the square root of the K-FAC metric. Go-MUON bounds the operator norm of the
    same matrix instead.

    Args:
        D: [..., m, n] a direction.
        A: [..., n, n] symmetric positive semi-definite, the input side.
        B: [..., m, m] symmetric positive semi-definite, the output side.
    """
    arguments.square(A, "A")
    arguments.square(B, "B")
    D = arguments.sided(D, B, A, ("D", "B", "A"))
    return torch.linalg.matrix_norm(_quarter_root(B) @ D @ _quarter_root(A))


def _quarter_root(S: Tensor) -> Tensor:
    """S^¼; eigenvalues that rounding made negative count as zero."""
    eigenvalues, V = decompose(torch.linalg.eigh, S)
    return (V * eigenvalues.clamp_min(0).pow(0.25).unsqueeze(-2)) @ V.mT


def oas_condition_bound(d: int, intensity: float | Tensor) -> float | Tensor:
    """κ₂(OAS(S)) ≤ (d − (d−1)λ)/λ for λ > 0 and tr(S) > 0, Equation (19)."""
    arguments.number(d, "d must be a whole number >= 1", 1, whole=True)
    if isinstance(intensity, Tensor):
        arguments.floating(intensity, "intensity", "[...]", 0)
        size = float(d)  # a tensor rejects whole numbers that are too large for its dtype
        return (size - (size - 1) * intensity) / intensity
    intensity = arguments.number(intensity, "intensity must be a number > 0", arguments.LEAST)
    return (d - (d - 1) * intensity) / intensity


def cached_efficiency_bound(
    left: Tensor, right: Tensor, cached_left: Tensor, cached_right: Tensor
) -> Tensor:
    """Θ⁻¹, the least fraction of the current oracle value that a cached direction reaches.

    Θ = κ₂(P_B⁻¹P̃_B)·κ₂(P_A⁻¹P̃_A), Equation (7). The bound is Equation (36),
    Proposition 7 in the appendix.
    """
    drift_left = _drift(left, cached_left, "left")
    drift_right = _drift(right, cached_right, "right")
    arguments.same_dtype_and_device(right, "right", left, "left")
    arguments.broadcast_shape(drift_right.shape[:-2], "right", drift_left.shape[:-2], "left")
    return 1 / (_condition_number(drift_left, "left") * _condition_number(drift_right, "right"))


def _drift(P: Tensor, cached: Tensor, name: str) -> Tensor:
    """P⁻¹P̃."""
    arguments.square(P, name)
    arguments.square(cached, f"cached_{name}")
    # Expanded: with fewer dimensions than P, torch would read it as a batch of vectors.
    cached = arguments.sided(cached, P, None, (f"cached_{name}", name, ""))
    arguments.not_empty(P, name)
    return attempt(torch.linalg.solve, P, cached)


def softmax_fisher(p: Tensor) -> Tensor:
    """B_{F,z} = Diag(p) − ppᵀ: Fisher and GGN factor of the logits, p [..., c]."""
    arguments.floating(p, "p", "[..., c]", 1)
    return torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)


def observed_label_factor(q: Tensor, p: Tensor) -> Tensor:
    """B_{q,z} = E_{y∼q}[(p − e_y)(p − e_y)ᵀ], [..., c, c]; with q = p it is B_{F,z}.

    Labels have the distribution q, the model predicts p, both [..., c].
    """
    q = p + _residual(q, p)  # in p's dtype, and of the shape that both broadcast to
    cross = p.unsqueeze(-1) * q.unsqueeze(-2)
    return torch.diag_embed(q) - cross - cross.mT + p.unsqueeze(-1) * p.unsqueeze(-2)


def observed_label_mismatch(q: Tensor, p: Tensor) -> Tensor:
    """B_{q,z} − B_{F,z} = Diag(r) − prᵀ − rpᵀ with r = q − p, Equation (10) (Proposition 3)."""
    r = _residual(q, p)
    outer = p.unsqueeze(-1) * r.unsqueeze(-2)
    return torch.diag_embed(r) - outer - outer.mT


def observed_label_mismatch_bound(q: Tensor, p: Tensor, jacobian: Tensor | None = None) -> Tensor:
    """3‖q−p‖₂, Equation (10), times ‖J_l‖₂² for a hidden layer, Equation (11) (Proposition 3).

    A hidden layer has δ_l = J_lᵀδ_z.

    Args:
        q: [..., c] the labels' distribution.
        p: [..., c] the model's.
        jacobian: [..., c, k] J_l, or None for the logits themselves.
    """
    bound = 3 * torch.linalg.vector_norm(_residual(q, p), dim=-1)
    if jacobian is None:
        return bound
    arguments.matrix(jacobian, "jacobian")
    arguments.decomposable(jacobian, "jacobian")
    arguments.not_empty(jacobian, "jacobian")
    if jacobian.shape[-2] != p.shape[-1]:
        raise ValueError(
            f"jacobian must be [..., {p.shape[-1]}, k], a row for each class, "
            f"got shape {tuple(jacobian.shape)}"
        )
    arguments.same_device(jacobian, "jacobian", p, "p")
    arguments.broadcast_shape(jacobian.shape[:-2], "jacobian", bound.shape, "p")
    return bound * attempt(torch.linalg.matrix_norm, jacobian, ord=2).square()


def observed_factor_error_bound(
    estimated: Tensor, q: Tensor, p: Tensor, jacobian: Tensor | None = None
) -> Tensor:
    """‖B̂_l − B_{F,l}‖₂ ≤ ‖B̂_l − B_{q,l}‖₂ + 3‖J_l‖₂²‖q − p‖₂, the two parts of Corollary 4.

    The first vanishes as samples grow, the second as the model approaches the labels' distribution.

    Args:
        estimated: [..., k, k] B̂_l, an estimate of B_{q,l}.
        q: [..., c] the labels' distribution.
        p: [..., c] the model's.
        jacobian: [..., c, k] J_l, or None for the logits themselves; then k = c.
    """
    mismatch = observed_label_mismatch_bound(q, p, jacobian)
    arguments.decomposable(p, "p")
    observed = observed_label_factor(q, p).to(p.dtype)
    if jacobian is not None:
        arguments.same_dtype_and_device(jacobian, "jacobian", p, "p")
        observed = jacobian.mT @ observed @ jacobian
    return _operator_distance(estimated, "estimated", observed, "B_q") + mismatch


def _residual(q: Tensor, p: Tensor) -> Tensor:
    """The difference q − p; q may have an integer dtype."""
    arguments.floating(p, "p", "[..., c]", 1)
    arguments.tensor(q, "q")
    if q.is_complex() or q.dtype is torch.bool:
        raise ValueError(f"q needs real numbers, got {q.dtype}")
    if not q.ndim or q.shape[-1] != p.shape[-1]:
        raise ValueError(f"q must be [..., {p.shape[-1]}] as p is, got shape {tuple(q.shape)}")
    arguments.same_device(q, "q", p, "p")
    arguments.broadcast_shape(q.shape, "q", p.shape, "p")
    return q - p


def factor_error_terms(
    cached: Tensor, current: Tensor, estimated: Tensor, observed: Tensor, fisher: Tensor
) -> Tensor:
    """The four terms of Equation (20), [..., 4]; their sum bounds ‖B̄_t^eff − B_{F,t}‖₂.

    In order: finite sample, model mismatch, shrinkage and floor, average and staleness.

    Args:
        cached: [..., d, d] B̄_t^eff, the averaged factor after shrinkage and floor.
        current: [..., d, d] B_t^eff, this batch's factor after shrinkage and floor.
        estimated: [..., d, d] B̂_t, this batch's second moment.
        observed: [..., d, d] B_{q,t}, its expectation over the labels' distribution.
        fisher: [..., d, d] B_{F,t}, the same over the model's.
    """
    terms = [
        _operator_distance(estimated, "estimated", observed, "observed"),
        _operator_distance(observed, "observed", fisher, "fisher"),
        _operator_distance(current, "current", estimated, "estimated"),
        _operator_distance(cached, "cached", current, "current"),
    ]
    ends = arguments.broadcast_shape(terms[0].shape, "estimated", terms[1].shape, "fisher")
    arguments.broadcast_shape(terms[3].shape, "cached", ends, "estimated and fisher")
    return torch.stack(torch.broadcast_tensors(*terms), -1)


def _operator_distance(S: Tensor, name: str, T: Tensor, other: str) -> Tensor:
    """‖S − T‖₂."""
    for X, called in ((S, name), (T, other)):
        arguments.square(X, called)
        arguments.decomposable(X, called)
        arguments.not_empty(X, called)
    if S.shape[-1] != T.shape[-1]:
        raise ValueError(
            f"{name} must have {other}'s size, {T.shape[-1]}×{T.shape[-1]}, got shape "
            f"{tuple(S.shape)}"
        )
    arguments.same_dtype_and_device(S, name, T, other)
    arguments.broadcast_shape(S.shape[:-2], name, T.shape[:-2], other)
    return attempt(torch.linalg.matrix_norm, S - T, ord=2)


def ema_variance(beta: float, every: int = 1) -> float:
    """(1−β^K)/(1+β^K), Equation (24); with K = 1 Equation (25).

    The stationary variance of an average renewed every K steps with β^K, for IID observations of
    variance 1.
    """
    beta = _clock(beta, every)
    decay = beta**every
    return (1 - decay) / (1 + decay)


def sparse_variance_ratio(beta: float, every: int) -> float:
    """Variance with K over variance with K = 1, Equations (24) and (25) (Proposition 6)."""
    return ema_variance(beta, every) / ema_variance(beta)


def ema_covariance(autocovariances: Tensor, beta: float, every: int = 1) -> Tensor:
    """Cov(vec Y), the stationary covariance of the sparse average, [..., d, d]; Equation (23).

    With K = 1 it is Cov(vec Z). In b = β^K it is (1−b)/(1+b)·(Γ_0 + Σ_{j≥1} b^j(Γ_{jK} + Γ_{jK}ᵀ)).

    Args:
        autocovariances: [..., h, d, d] Γ_0, …, Γ_{h−1} of the observations, with
            Γ_j = Cov(X_{t+j}, X_t); later ones are zero.
        beta: β_B, in [0, 1).
        every: K, the steps between two observations.
    """
    arguments.floating(autocovariances, "autocovariances", "[..., h, d, d]", 3)
    arguments.square(autocovariances, "autocovariances")
    arguments.not_empty(autocovariances, "autocovariances")
    if autocovariances.shape[-3] == 0:
        raise ValueError(
            f"autocovariances must begin with Γ_0, got shape {tuple(autocovariances.shape)}"
        )
    beta = _clock(beta, every)
    lags = autocovariances.shape[-3]
    observed = autocovariances[..., :: min(every, lags), :, :]
    weights = [(beta**every) ** j for j in range(1, observed.shape[-3])]
    later = observed[..., 1:, :, :] * observed.new_tensor(weights)[:, None, None]
    one_way = later.sum(-3)
    return ema_variance(beta, every) * (observed[..., 0, :, :] + one_way + one_way.mT)


def sparse_noise_gain(beta: float, every: int, frequency: float) -> float:
    """`|G_K(ω)|²/|H₁(ω)|²`, how much more noise of frequency ω the sparse average lets through.

    G_K and H₁ are the transfer functions of the sparse and the per-step average. The gain is never
    below 1, so for any stationary noise the sparse average has the larger covariance: Equation (23)
    (Proposition 6).

    Args:
        beta: β_B, in [0, 1).
        every: K, the steps between two observations.
        frequency: ω, in radians per step.
    """
    beta = _clock(beta, every)
    omega = float(arguments.number(frequency, "frequency must be a finite number"))
    omega = math.remainder(omega, math.tau)
    decay = beta**every
    # |1 − βe^(−iω)|² = (1−β)² + 4β·sin²(ω/2). Written so, nothing cancels.
    dense = 4 * beta * (math.sin(omega / 2) / (1 - beta)) ** 2
    sparse = 4 * decay * (math.sin(every * omega / 2) / (1 - decay)) ** 2 if decay else 0.0
    return (1 + dense) / (1 + sparse)


def sparse_lag(beta: float, every: int) -> float:
    """L_K = Kβ^K/(1−β^K) + (K−1)/2, Equation (26): mean lag on an affine signal (Proposition 6)."""
    beta = _clock(beta, every)
    decay = beta**every
    return every * decay / (1 - decay) + (every - 1) / 2


def _clock(beta: float, every: int) -> float:
    arguments.number(every, "every must be a whole number >= 1", 1, whole=True)
    return float(arguments.number(beta, "beta must be a number in [0, 1)", 0, 1))
