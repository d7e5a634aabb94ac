"""The support polar Q(C): a maximiser of ⟨C, U⟩ over ‖U‖_op ≤ 1 (Theorem 1)."""

import math
from functools import partial
from itertools import chain, repeat
from typing import Literal, get_args

import torch
from torch import Tensor

from gomuon.functional.linalg import decompose, has_float64, over_batch
from gomuon.functional.products import symmetric_product

PolarMethod = Literal["svd", "canonical", "gram", "polar-express", "auto"]

_svd = partial(torch.linalg.svd, full_matrices=False)


def polar(X: Tensor, method: PolarMethod = "svd") -> Tensor:
    """Polar factor of X, the direction of Equation (1); X = 0 gives 0.

    Args:
        X: [..., m, n], float32 or float64.
        method: how it is computed.
            "svd": UVᵀ of the compact SVD, the paper's choice. At rank deficiency it completes the
            null space to a semi-orthogonal matrix.
            "canonical": the null space set to zero. Equal to "svd" at full rank. Singular values
            below max(m, n)·ε·σ₁ count as zero; roundoff of ill-conditioned maps may exceed that.
            "gram": X(XᵀX)^(−1/2) through float64, for float32 matrices; more accurate than their
            SVD wherever it applies, and quicker when X is far from square. Matrices whose condition
            number exceeds about 1e6 go to "svd" instead.
            "polar-express": sixteen steps of matrix products in X's precision, for accelerators.
            Singular values below about 1e-6 of ‖X‖_F stay below one.
            "auto": "gram" on the CPU; elsewhere "polar-express" with its first products in float64,
            where the device has it, and as many steps as the size asks for. Within 1e-5 of the
            float64 SVD up to a condition number of 1e4.

    Raises:
        ValueError: X is not a floating matrix, or the method is unknown.
        DecompositionError: the SVD failed, in float64 too.
    """
    if X.ndim < 2 or X.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"polar needs a float32 or float64 tensor [..., m, n], got {X.dtype} {tuple(X.shape)}"
        )
    if method not in get_args(PolarMethod):
        raise ValueError(f"polar method must be one of {get_args(PolarMethod)}, got {method!r}")
    if not X.numel():
        return torch.zeros_like(X)
    compute = _METHODS[method]
    return over_batch(lambda part: (compute(part),), X)[0]


def _by_svd(X: Tensor) -> Tensor:
    U, _, Vh = decompose(_svd, X)
    # LAPACK returns unit vectors for the zero matrix; the paper defines D₀ = 0 there.
    return (U @ Vh) * (X != 0).any(dim=(-2, -1), keepdim=True)


def _canonical(X: Tensor) -> Tensor:
    U, sigma, Vh = decompose(_svd, X)
    # Singular values at roundoff scale belong to the null space (the usual numerical rank).
    floor = sigma[..., :1] * max(X.shape[-2:]) * torch.finfo(X.dtype).eps
    return (U * (sigma > floor).to(X.dtype).unsqueeze(-2)) @ Vh


# ---- through the Gram matrix -------------------------------------------------------------------

# 1/κ², the ratio of the Gram's extreme eigenvalues, decides how far float64 carries:
_FLOAT32_SUFFICES = 1e-3  # above, the last product may be in float32: it costs less than 4e-6
_POLISHED_BELOW = (1e-9, 1e-11)  # lengths are wrong by 1e-5 and 1e-3, which a step each squares
_GRAM_LIMIT = 1e-12  # below, too little is left of the smallest singular values: κ > 1e6
_AT_ONCE = 2**25  # elements that are held in float64 at a time


def _by_gram(X: Tensor) -> Tensor:
    if X.dtype == torch.float64:
        return _by_svd(X)  # the Gram squares the condition number, and there is no wider dtype
    wide = X.shape[-2] < X.shape[-1]
    tall = (X.mT if wide else X).reshape(-1, max(X.shape[-2:]), min(X.shape[-2:]))
    pieces = tall.split(max(1, _AT_ONCE // max(1, tall[0].numel())))
    Q = torch.cat([_gram_route(piece) for piece in pieces])
    return (Q.mT if wide else Q).reshape(X.shape)


def _gram_route(X: Tensor) -> Tensor:
    """X(XᵀX)^(−1/2), [b, m, n] with m ≥ n; UVᵀ where the Gram does not hold enough of X."""
    Y = X.double()
    values, V = decompose(torch.linalg.eigh, symmetric_product(Y))
    ratio = values[:, 0] / values[:, -1]
    usable = ratio > _GRAM_LIMIT  # not so for NaN, which 0/0 gives
    root = (V * values.clamp_min(torch.finfo(values.dtype).tiny).rsqrt().unsqueeze(-2)) @ V.mT
    if bool((ratio > _FLOAT32_SUFFICES).all()):
        return X @ root.float()
    Q = (Y @ root).float()
    for limit in _POLISHED_BELOW:
        rough = usable & (ratio < limit)
        if bool(rough.any()):
            Q[rough] = _newton_schulz(Q[rough])
    if not bool(usable.all()):
        Q[~usable] = _by_svd(X[~usable])
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


_STEPS = 16  # enough for singular values of 3e-6 and more: condition 1e4 up to a side of 1024
_WIDE_STEPS = 8  # by then singular values of 1e-5 have grown to .1, and float32 holds them


def _further_steps(side: int) -> int:
    """‖X‖_F grows with the square root of the smaller side, and a step makes up for 1.875."""
    return max(0, math.ceil(math.log(max(side, 1) / 1024) / (2 * math.log(_LIMIT[0]))))


def _polar_express(X: Tensor, steps: int = _STEPS, wide_steps: int = 0) -> Tensor:
    tall = X.shape[-2] > X.shape[-1]
    Y = X.mT if tall else X  # the Gram matrix is then the smaller one
    Y = _unit(Y.double() if wide_steps else Y)  # dividing in float32 would cost ε·κ already
    for step, (a, b, c) in zip(range(steps), chain(_POLAR_EXPRESS, repeat(_LIMIT)), strict=False):
        Y = _quintic(Y if step < wide_steps else Y.to(X.dtype), a, b, c)
    return Y.mT if tall else Y


def _quintic(Y: Tensor, a: float, b: float, c: float) -> Tensor:
    """aY + bYYᵀY + c(YYᵀ)²Y."""
    gram = Y @ Y.mT
    return a * Y + (b * gram + c * gram @ gram) @ Y


def _unit(X: Tensor) -> Tensor:
    """X/‖X‖_F; dividing by the largest entry first keeps tiny and huge square sums in range."""
    tiny = torch.finfo(X.dtype).tiny
    X = X / X.abs().amax(dim=(-2, -1), keepdim=True).clamp_min(tiny)
    return X / torch.linalg.matrix_norm(X, keepdim=True).clamp_min(tiny)


# ---- the choice ----------------------------------------------------------------------------------


def _auto(X: Tensor) -> Tensor:
    if X.device.type == "cpu":
        return _by_gram(X)
    more = _further_steps(min(X.shape[-2:]))
    return _polar_express(X, _STEPS + more, _WIDE_STEPS + more if has_float64(X) else 0)


_METHODS = {
    "svd": _by_svd,
    "canonical": _canonical,
    "gram": _by_gram,
    "polar-express": _polar_express,
    "auto": _auto,
}
