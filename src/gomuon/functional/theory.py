"""The paper's identities and bounds, each as a function of its quantities.

They serve as oracles in the tests, and for anyone who wants to know how far a guarantee reaches.
"""

import torch
from torch import Tensor


def oracle_value(M: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """‖C‖_* with C = P_B M P_A: the value of the support problem at radius one (Theorem 1)."""
    return torch.linalg.matrix_norm(left @ M @ right, ord="nuc")


def condition_number(S: Tensor) -> Tensor:
    """κ₂(S): the ratio of the largest to the smallest singular value."""
    sigma = torch.linalg.svdvals(S)
    return sigma[..., 0] / sigma[..., -1]


def grafted_alignment_bound(A: Tensor, B: Tensor, M: Tensor, alpha: float) -> Tensor:
    """⟨M, D̂_α⟩ ≥ K_AB^(−α)·‖M‖_*, K_AB = κ₂(A)κ₂(B) (Proposition 5, first half)."""
    return grafted_condition_bound(A, B, alpha).reciprocal() * torch.linalg.matrix_norm(
        M, ord="nuc"
    )


def grafted_condition_bound(A: Tensor, B: Tensor, alpha: float) -> Tensor:
    """κ₊(D̂_α) ≤ K_AB^α (Proposition 5, second half)."""
    return (condition_number(A) * condition_number(B)).pow(alpha)


def oas_condition_bound(d: int, intensity: float | Tensor) -> float | Tensor:
    """κ₂(OAS(S)) ≤ (d − (d−1)λ)/λ for λ > 0 and tr(S) > 0 (Equation 19)."""
    return (d - (d - 1) * intensity) / intensity


def cached_efficiency_bound(
    left: Tensor, right: Tensor, cached_left: Tensor, cached_right: Tensor
) -> Tensor:
    """Θ⁻¹, the least fraction of the current oracle value a cached direction reaches.

    Θ = κ₂(P_B⁻¹P̃_B)·κ₂(P_A⁻¹P̃_A), Equation (7); the bound is Proposition 7, in
    the appendix.
    """
    drift_left = torch.linalg.solve(left, cached_left)
    drift_right = torch.linalg.solve(right, cached_right)
    return 1 / (condition_number(drift_left) * condition_number(drift_right))


def softmax_fisher(p: Tensor) -> Tensor:
    """B_{F,z} = Diag(p) − ppᵀ: Fisher and GGN factor of the logits, p [..., c]."""
    return torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)


def observed_label_mismatch(q: Tensor, p: Tensor) -> Tensor:
    """B_{q,z} − B_{F,z} = Diag(r) − prᵀ − rpᵀ with r = q − p (Proposition 3)."""
    r = q - p
    outer = p.unsqueeze(-1) * r.unsqueeze(-2)
    return torch.diag_embed(r) - outer - outer.mT


def observed_label_mismatch_bound(q: Tensor, p: Tensor, jacobian: Tensor | None = None) -> Tensor:
    """3‖q−p‖₂, times ‖J_l‖₂² for a hidden layer with δ_l = J_lᵀδ_z (Proposition 3)."""
    bound = 3 * torch.linalg.vector_norm(q - p, dim=-1)
    return bound if jacobian is None else bound * torch.linalg.matrix_norm(jacobian, ord=2).square()


def ema_variance(beta: float, every: int = 1) -> float:
    """Stationary variance of an average renewed every K steps with β^K, per unit of noise."""
    decay = beta**every
    return (1 - decay) / (1 + decay)


def sparse_variance_ratio(beta: float, every: int) -> float:
    """Variance of the sparse average over the per-step one's, IID noise (Proposition 6)."""
    return ema_variance(beta, every) / ema_variance(beta)


def sparse_lag(beta: float, every: int) -> float:
    """L_K = Kβ^K/(1−β^K) + (K−1)/2, phase-averaged lag on an affine signal (Proposition 6)."""
    decay = beta**every
    return every * decay / (1 - decay) + (every - 1) / 2
