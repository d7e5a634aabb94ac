"""The support polar Q(C): a maximiser of ⟨C, U⟩ over ‖U‖_op ≤ 1 (Theorem 1)."""

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from gomuon.functional import linalg
from gomuon.functional.linalg import decompose, finite_matrices, over_batch, symmetric_product
from gomuon.functional.polar_express import exact_by_products, fast_polar, null_below

PolarMethod = Literal["fast", "exact", "svd", "canonical", "auto"]

_svd = partial(torch.linalg.svd, full_matrices=False)


def polar(X: Tensor, method: PolarMethod = "svd") -> Tensor:
    """Polar factor of X [..., m, n], Equation (1); see `gomuon.functional.polar`."""
    if not X.numel():
        return torch.zeros_like(X)
    multiplies = only_multiplies(method, X.dtype)
    return over_batch(lambda part: (_POLAR_METHODS[method](part),), X, multiplies=multiplies)[0]


def only_multiplies(method: PolarMethod, dtype: torch.dtype) -> bool:
    """Whether polar factors are products alone, also on the CPU."""
    return method == "fast" or (method == "auto" and dtype != torch.float64)


# ---- by SVD --------------------------------------------------------------------------------------


def _decomposed(X: Tensor, complete: bool) -> Tensor:
    """By LAPACK. It rejects a whole batch for one NaN, so such matrices become NaN here."""
    finite = finite_matrices(X)[..., None, None]
    if not bool(finite.all()):
        return torch.where(finite, _decomposed(torch.where(finite, X, 0.0), complete), torch.nan)
    # The Gram squares the condition number, and there is no dtype wider than float64.
    compute = _by_svd if X.dtype == torch.float64 else _by_gram
    return compute(X, complete)


def _by_svd(X: Tensor, complete: bool) -> Tensor:
    U, sigma, Vh = decompose(_svd, X)
    if complete:
        # LAPACK returns unit vectors for the zero matrix; the paper defines D₀ = 0 there.
        return (U @ Vh) * (X != 0).any(dim=(-2, -1), keepdim=True)
    present = sigma > sigma[..., :1] * null_below(X.dtype)
    return (U * present.to(X.dtype).unsqueeze(-2)) @ Vh


# ---- through the Gram matrix, for float32 ------------------------------------------------------

# 1/κ², the ratio of the Gram's extreme eigenvalues, decides whether float64 is precise enough:
_FLOAT32_SUFFICES = 1e-3  # above, the last product may be in float32: its error is below 4e-6
# Below these, singular values are wrong by 1e-5 and 1e-3. A Newton–Schulz step squares the error.
_POLISHED_BELOW = (1e-9, 1e-11)
_GRAM_LIMIT = 1e-12  # below, the smallest singular values are lost: κ > 1e6
_AT_ONCE = 2**25  # largest number of elements in float64 at a time


def _by_gram(X: Tensor, complete: bool) -> Tensor:
    wide = X.shape[-2] < X.shape[-1]
    tall = (X.mT if wide else X).reshape(-1, max(X.shape[-2:]), min(X.shape[-2:]))
    pieces = tall.split(max(1, _AT_ONCE // max(1, tall[0].numel())))
    Q = torch.cat([_gram_route(piece, complete) for piece in pieces])
    return (Q.mT if wide else Q).reshape(X.shape)


def _gram_route(X: Tensor, complete: bool) -> Tensor:
    """X(XᵀX)^(−1/2), [b, m, n] with m ≥ n; the inverse root is zero on the null space.

    `complete` uses UVᵀ instead if the Gram does not keep enough of X.
    """
    Y = X.double()
    values, V = decompose(torch.linalg.eigh, symmetric_product(Y))
    smallest = values[:, 0] / values[:, -1]
    lengths = values.clamp_min(torch.finfo(values.dtype).tiny).rsqrt()
    if not complete:
        # The square of float32's threshold is still above the float64 precision of the Gram.
        present = values > values[:, -1:] * null_below(X.dtype) ** 2
        lengths = lengths * present
        ratios = torch.where(present, values / values[:, -1:], 1.0)
        smallest = ratios.amin(-1)
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
