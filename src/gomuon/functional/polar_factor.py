"""The support polar Q(C): a maximiser of ⟨C, U⟩ over ‖U‖_op ≤ 1 (Theorem 1)."""

import math
from collections.abc import Callable
from functools import cache, partial
from itertools import chain, repeat
from typing import Literal

import torch
from torch import Tensor

from gomuon.functional import linalg
from gomuon.functional.linalg import (
    decompose,
    finite_matrices,
    has_float64,
    over_batch,
    symmetric_product,
)

PolarMethod = Literal["svd", "canonical", "polar-express", "auto"]

_svd = partial(torch.linalg.svd, full_matrices=False)


def polar(X: Tensor, method: PolarMethod = "svd") -> Tensor:
    """Polar factor of X [..., m, n], Equation (1); see `gomuon.functional.polar`."""
    if not X.numel():
        return torch.zeros_like(X)
    return over_batch(lambda part: (_POLAR_METHODS[method](part),), X)[0]


# ---- the null space ------------------------------------------------------------------------------

# The largest value, in units of ε·σ₁, that rounding can make from a zero singular value. Measured
# on a GPT with LayerNorm, whose gradients lack one rank: at most 9 after the maps, in float32.
_ROUNDOFF = 32


def _null_below(dtype: torch.dtype) -> float:
    """Singular values below this share of the largest belong to the null space."""
    return _ROUNDOFF * torch.finfo(dtype).eps


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
    present = sigma > sigma[..., :1] * _null_below(X.dtype)
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
        present = values > values[:, -1:] * _null_below(X.dtype) ** 2
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


# ---- by matrix products --------------------------------------------------------------------------

# Minimax-optimal odd quintics for singular values in [1e-3, 1] (Polar Express, Amsel et al. 2025);
# the limit is the Newton–Schulz quintic, which converges cubically from there on.
_POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)
_LIMIT = (1.875, -1.25, 0.375)


# An odd quintic with p(0) = p'(0) = p'(1) = 0 and p(1) = 1. Values below .816 go to zero, values
# above go to one.
_SEPARATING = (0.0, 2.5, -1.5)
_SEPARATING_STEPS = 4
_SEPARATED_AT = math.sqrt(2 / 3)
_WIDE_STEPS = 8  # after these, singular values of 1e-5 have grown to .1, enough for float32


@cache
def _steps_to(floor: float) -> int:
    """Number of steps after which a singular value of `floor` is above the separation point."""
    sigma = floor
    for step, (a, b, c) in enumerate(chain(_POLAR_EXPRESS, repeat(_LIMIT))):
        if sigma >= _SEPARATED_AT:
            return step
        sigma = a * sigma + b * sigma**3 + c * sigma**5
    raise AssertionError("unreachable")


def _polar_express(X: Tensor, wide_steps: int = 0) -> Tensor:
    """Polar Express, then steps that set the null space to zero; `wide_steps` are in float64."""
    tall = X.shape[-2] > X.shape[-1]
    Y = X.mT if tall else X  # the Gram matrix is then the smaller one
    Y = _unit(
        Y.double() if wide_steps else Y
    )  # a division in float32 would already have an error of ε·κ
    steps = _steps_to(_null_below(X.dtype))
    for step, coefficients in zip(
        range(steps), chain(_POLAR_EXPRESS, repeat(_LIMIT)), strict=False
    ):
        Y = _quintic(Y if step < wide_steps else Y.to(X.dtype), *coefficients, rescaled=step == 0)
    for _ in range(_SEPARATING_STEPS):
        Y = _quintic(Y, *_SEPARATING)
    return Y.mT if tall else Y


def _quintic(Y: Tensor, a: float, b: float, c: float, *, rescaled: bool = False) -> Tensor:
    """aY + bYYᵀY + c(YYᵀ)²Y; `rescaled` first divides Y by about its operator norm."""
    gram = Y @ Y.mT
    square = gram @ gram
    if rescaled:
        # (Σσ⁸)^(1/8) is at most k^(1/8) above σ₁, where ‖Y‖_F may be k^(1/2) above it.
        length = torch.linalg.matrix_norm(square, keepdim=True).pow(0.25)
        length = torch.where(length > 0, length, 1.0)
        Y, gram, square = Y / length, gram / length**2, square / length**4
    return a * Y + (b * gram + c * square) @ Y


def _unit(X: Tensor) -> Tensor:
    """X/‖X‖_F; dividing by the largest entry first keeps tiny and huge square sums in range."""
    tiny = torch.finfo(X.dtype).tiny
    X = X / X.abs().amax(dim=(-2, -1), keepdim=True).clamp_min(tiny)
    return X / torch.linalg.matrix_norm(X, keepdim=True).clamp_min(tiny)


# ---- the choice ----------------------------------------------------------------------------------


def _auto(X: Tensor) -> Tensor:
    if linalg.decomposes_well(X.device):
        return _decomposed(X, complete=False)
    return _polar_express(X, _WIDE_STEPS if has_float64(X) else 0)


_POLAR_METHODS: dict[str, Callable[[Tensor], Tensor]] = {
    "svd": partial(_decomposed, complete=True),
    "canonical": partial(_decomposed, complete=False),
    "polar-express": _polar_express,
    "auto": _auto,
}
