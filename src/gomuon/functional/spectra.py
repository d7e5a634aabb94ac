"""Extreme eigenvalues, inverses, nuclear norms and ranks, where possible without decompositions.

Each has two forms, as roots and polar factors have. On the CPU a matrix is decomposed. On devices
where that is slow only products are formed: nothing is decomposed and nothing waits.
"""

import torch
from torch import Tensor

from gomuon.functional import linalg
from gomuon.functional.linalg import decompose, identity_like, symmetric_product
from gomuon.functional.mapped_roundoff import MappedRoundoff, null_below
from gomuon.functional.polar_express import exact_by_products, fast_polar
from gomuon.functional.polar_factor import mapped_polar, rank_of

# After k squarings the estimate of λ_max is at most d^(1/2^(k+1)) too large: .1 % at d = 4096.
SQUARINGS = 12
# Newton's iteration for an inverse doubles its digits once 2^k is larger than the condition number.
_INVERSE_STEPS = 20


def largest_eigenvalue(S: Tensor) -> Tensor:
    """λ_max of symmetric positive semi-definite S [..., d, d], by squaring; never too small."""
    tiny = torch.finfo(S.dtype).tiny
    logarithm: Tensor | float = 0.0
    share = 1.0
    for _ in range(SQUARINGS):
        length = torch.linalg.matrix_norm(S, keepdim=True).clamp_min(tiny)
        S = S / length
        S = S @ S
        logarithm = logarithm + share * length.log()
        share /= 2
    last = torch.linalg.matrix_norm(S, keepdim=True).clamp_min(tiny)
    return (logarithm + share * last.log()).exp()[..., 0, 0]


def operator_norm(X: Tensor) -> Tensor:
    """‖X‖_op of X [..., m, n]; never too small."""
    tall = X.shape[-2] > X.shape[-1]
    scale = X.abs().amax(dim=(-2, -1), keepdim=True)  # keeps the squares below in range
    Y = X / torch.where(scale > 0, scale, 1.0)
    gram = symmetric_product(Y if tall else Y.mT)
    norm = largest_eigenvalue(gram).sqrt() * scale[..., 0, 0]
    return torch.where(scale[..., 0, 0] > 0, norm, 0.0)


def leading_projector(S: Tensor) -> Tensor:
    """The projector onto the leading eigenvector of symmetric positive semi-definite S [..., d, d].

    By squaring: an eigenvalue λ₂ has the share (λ₂/λ₁)^4096, so that equal ones share. Its trace is
    one; for S = 0 it is zero.
    """
    for _ in range(SQUARINGS):
        S = _of_trace_one(S)
        S = S @ S
    return _of_trace_one(S)


def _of_trace_one(S: Tensor) -> Tensor:
    trace = S.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    return S * torch.where(trace > 0, trace.reciprocal(), 0.0)


def eigenvalue_range(S: Tensor) -> tuple[Tensor, Tensor]:
    """λ_min and λ_max of symmetric positive definite S [..., d, d]."""
    if linalg.decomposes_well(S.device):
        (values,) = decompose(lambda part: (torch.linalg.eigvalsh(part),), S)
        return values[..., 0], values[..., -1]
    largest = largest_eigenvalue(S)
    return largest_eigenvalue(_inverse_by_products(S, largest)).reciprocal(), largest


def inverse_and_spectrum(P: Tensor, above: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """P⁻¹, λ_min, λ_max and how many eigenvalues are at least `above`·λ_min.

    P is symmetric positive definite, [..., d, d].
    """
    if linalg.decomposes_well(P.device):
        values, V = decompose(torch.linalg.eigh, P)
        inverse = (V / values.unsqueeze(-2)) @ V.mT
        smallest, largest = values[..., 0], values[..., -1]
        return inverse, smallest, largest, (values >= above * values[..., :1]).sum(-1)
    largest = largest_eigenvalue(P)
    inverse = _inverse_by_products(P, largest)
    smallest = largest_eigenvalue(inverse).reciprocal()
    # The polar factor of a symmetric matrix has the signs of its eigenvalues.
    shifted = P - (above * smallest)[..., None, None] * identity_like(P)
    signs = fast_polar(shifted).diagonal(dim1=-2, dim2=-1).sum(-1)
    return inverse, smallest, largest, ((signs + P.shape[-1]) / 2).round()


def _inverse_by_products(S: Tensor, largest: Tensor) -> Tensor:
    """S⁻¹ by Newton's iteration X ← X(2I − SX) from I/λ_max."""
    twice = 2 * identity_like(S)
    X = identity_like(S) / largest[..., None, None]
    for _ in range(_INVERSE_STEPS):
        X = X @ (twice - S @ X)
        X = (X + X.mT) / 2  # otherwise rounding errors that are not symmetric grow
    return X


def nuclear_norm_and_rank(X: Tensor) -> tuple[Tensor, Tensor]:
    """‖X‖_* and the numerical rank of X [..., m, n], both [...].

    Singular values below `null_below` of the largest count as zero, as in `polar="exact"`.
    """
    if not linalg.decomposes_well(X.device):
        Q = exact_by_products(X, widens=False)
        return (X * Q).sum(dim=(-2, -1)), rank_of(Q)
    sigma = singular_values(X)
    present = sigma > sigma.amax(-1, keepdim=True) * null_below(X.dtype)
    return sigma.sum(-1).to(X.dtype), present.sum(-1).to(X.dtype)


def mapped_norm_and_rank(
    C: Tensor, M: Tensor, left: Tensor | None, right: Tensor | None
) -> tuple[Tensor, Tensor]:
    """‖C‖_* of C = P_B M P_A [b, m, n], and its rank without what the maps make of M's roundoff."""
    if left is None and right is None:
        return nuclear_norm_and_rank(C)
    if not linalg.decomposes_well(C.device):
        bound = MappedRoundoff(M, left, right).bound()
        Q = exact_by_products(C, widens=False, null_up_to=bound)
        return (C * Q).sum(dim=(-2, -1)), rank_of(Q)
    rank = rank_of(mapped_polar(C, "canonical", M, left, right))
    return singular_values(C).sum(-1).to(C.dtype), rank


def singular_values(X: Tensor) -> Tensor:
    """From the Gram matrix in float64, which is three times as fast as an SVD; [..., min(m, n)].

    Values below 1e-8 of the largest are rounding errors, so float64 matrices get an SVD.
    """
    if X.dtype == torch.float64:
        return decompose(lambda part: (torch.linalg.svdvals(part),), X)[0]
    tall = X.shape[-2] > X.shape[-1]
    gram = symmetric_product((X if tall else X.mT).double())
    (values,) = decompose(lambda part: (torch.linalg.eigvalsh(part),), gram)
    return values.clamp_min(0).sqrt()
