"""The support polar Q(C): a maximiser of ⟨C, U⟩ over ‖U‖_op ≤ 1 (Theorem 1)."""

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from gomuon.functional import linalg
from gomuon.functional.linalg import decompose, finite_matrices, over_batch, symmetric_product
from gomuon.functional.mapped_roundoff import MappedRoundoff, null_below
from gomuon.functional.polar_express import exact_by_products, fast_polar

PolarMethod = Literal["fast", "exact", "svd", "canonical", "auto"]

_svd = partial(torch.linalg.svd, full_matrices=False)


def polar(X: Tensor, method: PolarMethod = "svd") -> Tensor:
    """Polar factor of X [..., m, n], Equation (1); see `gomuon.functional.polar`."""
    if not X.numel():
        return torch.zeros_like(X)
    multiplies = only_multiplies(method, X.dtype)
    return over_batch(lambda part: (_POLAR_METHODS[method](part),), X, multiplies=multiplies)[0]


def mapped_polar(
    C: Tensor, method: PolarMethod, M: Tensor, left: Tensor | None, right: Tensor | None
) -> Tensor:
    """Polar factor of C = P_B M P_A [b, m, n], without what the maps make of M's roundoff.

    "svd" completes the null space and "fast" does not decide about single directions, so for both
    it is that of C alone.
    """
    no_maps = left is None and right is None
    if no_maps or method == "svd" or only_multiplies(method, C.dtype) or not C.numel():
        return polar(C, method)
    if C.ndim == 2:
        maps = (None if P is None else P[None] for P in (left, right))
        return mapped_polar(C[None], method, M[None], *maps)[0]
    roundoff = MappedRoundoff(M, left, right)
    if method == "canonical" or linalg.decomposes_well(C.device):
        return _decomposed(C, complete=False, roundoff=roundoff)
    return exact_by_products(C, null_up_to=roundoff.bound())


def only_multiplies(method: PolarMethod, dtype: torch.dtype) -> bool:
    """Whether polar factors are products alone, also on the CPU."""
    return method == "fast" or (method == "auto" and dtype != torch.float64)


def rank_of(Q: Tensor) -> Tensor:
    """The rank of a polar factor, [...]: its singular values are zero or one."""
    return Q.square().sum(dim=(-2, -1)).round()


# ---- by SVD --------------------------------------------------------------------------------------


def _decomposed(X: Tensor, complete: bool, roundoff: MappedRoundoff | None = None) -> Tensor:
    """By LAPACK. It rejects a whole batch for one NaN, so such matrices become NaN here."""
    finite = finite_matrices(X)[..., None, None]
    if not bool(finite.all()):
        usable = torch.where(finite, X, 0.0)
        return torch.where(finite, _decomposed(usable, complete, roundoff), torch.nan)
    # The Gram squares the condition number, and there is no dtype wider than float64.
    if X.dtype == torch.float64:
        return _by_svd(X, complete, roundoff)
    return _by_gram(X, complete, roundoff)


def _by_svd(X: Tensor, complete: bool, roundoff: MappedRoundoff | None = None) -> Tensor:
    U, sigma, Vh = decompose(_svd, X)
    if complete:
        # LAPACK returns unit vectors for the zero matrix; the paper defines D₀ = 0 there.
        return (U @ Vh) * (X != 0).any(dim=(-2, -1), keepdim=True)
    present = sigma > sigma[..., :1] * null_below(X.dtype)
    if roundoff is not None:
        unsure = sigma[:, -1] <= roundoff.rough_bound()
        if bool(unsure.any()):
            along = roundoff.of_matrices(unsure).along(U[unsure], Vh[unsure].mT)
            present[unsure] &= sigma[unsure] > along
    return (U * present.to(X.dtype).unsqueeze(-2)) @ Vh


# ---- through the Gram matrix, for float32 ------------------------------------------------------

# 1/κ², the ratio of the Gram's extreme eigenvalues, decides whether float64 is precise enough:
_FLOAT32_SUFFICES = 1e-3  # above, the last product may be in float32: its error is below 4e-6
# Below these, singular values are wrong by 1e-5 and 1e-3. A Newton–Schulz step squares the error.
_POLISHED_BELOW = (1e-9, 1e-11)
_GRAM_LIMIT = 1e-12  # below, the smallest singular values are lost: κ > 1e6
_AT_ONCE = 2**25  # largest number of elements in float64 at a time


def _by_gram(X: Tensor, complete: bool, roundoff: MappedRoundoff | None = None) -> Tensor:
    wide = X.shape[-2] < X.shape[-1]
    tall = (X.mT if wide else X).reshape(-1, max(X.shape[-2:]), min(X.shape[-2:]))
    if roundoff is not None:
        roundoff = roundoff.mT if wide else roundoff
        Q = _gram_route(tall, complete, roundoff)
    else:
        pieces = tall.split(max(1, _AT_ONCE // max(1, tall[0].numel())))
        Q = torch.cat([_gram_route(piece, complete) for piece in pieces])
    return (Q.mT if wide else Q).reshape(X.shape)


def _gram_route(X: Tensor, complete: bool, roundoff: MappedRoundoff | None = None) -> Tensor:
    """X(XᵀX)^(−1/2), [b, m, n] with m ≥ n; the inverse root is zero on the null space.

    `complete` uses UVᵀ instead if the Gram does not keep enough of X.
    """
    Y = X.double()
    values, V = decompose(torch.linalg.eigh, symmetric_product(Y))
    lengths = values.clamp_min(torch.finfo(values.dtype).tiny).rsqrt()
    smallest = values[:, 0] / values[:, -1]
    if not complete:
        # The square of float32's threshold is still above the float64 precision of the Gram.
        present = values > values[:, -1:] * null_below(X.dtype) ** 2
        if roundoff is not None:
            present &= _above_roundoff(Y, V, values, roundoff)
        lengths = lengths * present
        smallest = torch.where(present, values / values[:, -1:], 1.0).amin(-1)
    root = (V * lengths.unsqueeze(-2)) @ V.mT
    if bool((smallest > _FLOAT32_SUFFICES).all()):
        return X @ root.float()
    usable = smallest > _GRAM_LIMIT  # False for NaN, which 0/0 gives
    Q = (Y @ root).float()
    for limit in _POLISHED_BELOW:
        rough = usable & (smallest < limit)
        if bool(rough.any()):
            Q[rough] = _newton_schulz(Q[rough])
    if complete and not bool(usable.all()):
        Q[~usable] = _by_svd(X[~usable], complete)
    return Q


def _above_roundoff(Y: Tensor, V: Tensor, values: Tensor, roundoff: MappedRoundoff) -> Tensor:
    """Which right singular vectors V of Y stand above the mapped roundoff, [b, n]."""
    above = torch.ones_like(values, dtype=torch.bool)
    unsure = values[:, 0].clamp_min(0).sqrt() <= roundoff.rough_bound()
    if bool(unsure.any()):
        chosen = V[unsure]
        images = Y[unsure] @ chosen  # σu; in float64, so that u is accurate also where σ is small
        sigma = torch.linalg.vector_norm(images, dim=-2)
        U = images / sigma.clamp_min(torch.finfo(sigma.dtype).tiny).unsqueeze(-2)
        lengths = roundoff.of_matrices(unsure).along(U.float(), chosen.float())
        above[unsure] = sigma > lengths
    return above


def _newton_schulz(Q: Tensor) -> Tensor:
    return 1.5 * Q - 0.5 * Q @ (Q.mT @ Q)


# ---- the choice ----------------------------------------------------------------------------------


def _exact(X: Tensor) -> Tensor:
    if linalg.decomposes_well(X.device):
        return _decomposed(X, complete=False)
    return exact_by_products(X)


def _auto(X: Tensor) -> Tensor:
    # Who computes in float64 asks for its digits.
    return fast_polar(X) if only_multiplies("auto", X.dtype) else _exact(X)


_POLAR_METHODS: dict[str, Callable[[Tensor], Tensor]] = {
    "svd": partial(_decomposed, complete=True),
    "canonical": partial(_decomposed, complete=False),
    "exact": _exact,
    "fast": fast_polar,
    "auto": _auto,
}
