"""The polar factor by matrix products alone: Polar Express (Amsel et al. 2025).

An odd quintic moves every singular value towards one. A few quintics, each optimal for the interval
that the one before it leaves, do it in the fewest products. The null space stays small: a singular
value that rounding made from zero ends near zero.
"""

import math
from collections.abc import Iterator
from functools import cache
from itertools import chain, islice, repeat

import torch
from torch import Tensor

from gomuon.functional.linalg import TRIANGLE_FROM, has_float64, symmetric_result
from gomuon.functional.mapped_roundoff import norm_bound, null_below

Quintic = tuple[float, float, float]  # (a, b, c): Y ← aY + b(YYᵀ)Y + c(YYᵀ)²Y

# Minimax-optimal odd quintics for singular values in [1e-3, 1]; the limit is the Newton–Schulz
# quintic, which converges cubically from there on.
_POLAR_EXPRESS: tuple[Quintic, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)
_LIMIT: Quintic = (1.875, -1.25, 0.375)
_FLOOR = 1e-3  # the interval's lower end, for which these quintics are optimal


def _quintics() -> Iterator[Quintic]:
    return chain(_POLAR_EXPRESS, repeat(_LIMIT))


# Above its interval a quintic is steep: its slope is 24 in the first step and about 12 in the next.
# So that rounding cannot take the largest singular value there, not even in TF32, the first steps
# divide by this.
_MARGIN = 1.01
_STEPS_WITH_MARGIN = 4


def _with_margin(quintic: Quintic) -> Quintic:
    """The quintic of Y/_MARGIN."""
    a, b, c = quintic
    return a / _MARGIN, b / _MARGIN**3, c / _MARGIN**5


def _fast_quintics() -> Iterator[Quintic]:
    for step, quintic in enumerate(_quintics()):
        yield _with_margin(quintic) if step < _STEPS_WITH_MARGIN else quintic


def _value(sigma: float, quintic: Quintic) -> float:
    a, b, c = quintic
    return a * sigma + b * sigma**3 + c * sigma**5


# ---- fast ----------------------------------------------------------------------------------------

# Singular values above _FLOOR·σ₁ end within this distance of one.
_TOLERANCE = 0.01
# In bfloat16, where the hardware multiplies it natively, the last two steps keep this tolerance; a
# third one would leave up to .02 of a unit direction in the null space.
BFLOAT16_STEPS = 2
# From this ratio of the sides, iterating on the small Gram matrix needs fewer operations.
RECTANGULAR = 1.5
# The Gram matrix squares singular values. After this many steps its small eigenvalues have lost
# too many digits, and it is formed again.
STEPS_PER_GRAM = 4


@cache
def steps_to(tolerance: float) -> int:
    """The number of steps after which values in [_FLOOR, 1] are within `tolerance` of one."""
    lowest, highest = _FLOOR, 1.0
    for step, quintic in enumerate(_fast_quintics()):
        if max(1 - lowest, highest - 1) <= tolerance:
            return step
        # An optimal quintic takes the interval's lower end to its smallest value 1 − e, and the
        # largest value is 1 + e.
        lowest = _value(lowest, quintic)
        highest = 2 - lowest
    raise AssertionError("unreachable")


FAST_STEPS = steps_to(_TOLERANCE)


def fast_polar(X: Tensor) -> Tensor:
    """The polar factor of X [..., m, n] within `_TOLERANCE`, see `gomuon.functional.polar`.

    It never waits for the device and never decomposes.
    """
    if X.ndim != 3:
        return fast_polar(X.reshape(-1, *X.shape[-2:])).reshape(X.shape)
    tall = X.shape[-2] > X.shape[-1]
    Y = X.mT if tall else X  # [b, k, n] with k ≤ n: the Gram matrix is the smaller one
    # So that the squares below stay in range, for tiny and for huge numbers.
    Y = Y / Y.abs().amax(dim=(-2, -1), keepdim=True).clamp_min(torch.finfo(Y.dtype).tiny)
    quintics = list(islice(_fast_quintics(), FAST_STEPS))
    late = BFLOAT16_STEPS if Y.dtype == torch.float32 and multiplies_bfloat16(Y.device) else 0
    Y = _iterated(Y, quintics[: FAST_STEPS - late])
    for quintic in quintics[FAST_STEPS - late :]:
        Y = _bfloat16_step(Y, quintic)
    return Y.mT if tall else Y


def _iterated(Y: Tensor, quintics: list[Quintic]) -> Tensor:
    """The steps in Y's own precision, the first of which also divides Y by about its norm."""
    if Y.shape[-1] >= RECTANGULAR * Y.shape[-2]:
        for begin in range(0, len(quintics), STEPS_PER_GRAM):
            piece = quintics[begin : begin + STEPS_PER_GRAM]
            Y = _iterated_gram(Y, piece, unscaled=not begin) @ Y
        return Y
    for step, quintic in enumerate(quintics):
        gram = symmetric_result(Y, Y.mT)
        if step:
            small = _even_part(gram, quintic)
        else:
            small, _, length = _first_even_part(gram, quintic)
            Y = Y / length
        Y = torch.baddbmm(Y, small, Y, beta=quintic[0])
    return Y


def _iterated_gram(Y: Tensor, quintics: list[Quintic], *, unscaled: bool) -> Tensor:
    """Q such that QY is Y after these steps. All products are of commuting symmetric matrices."""
    gram = symmetric_result(Y, Y.mT)
    length: Tensor | None = None
    Q: Tensor | None = None
    for step, quintic in enumerate(quintics):
        if unscaled and not step:
            W, gram, length = _first_even_part(gram, quintic)
        else:
            W = _even_part(gram, quintic)
        W.diagonal(dim1=-2, dim2=-1).add_(quintic[0])
        if step + 1 < len(quintics):
            gram = symmetric_result(W, symmetric_result(gram, W))
        Q = W if Q is None else symmetric_result(W, Q)
    assert Q is not None
    return Q if length is None else Q / length


def _even_part(gram: Tensor, quintic: Quintic) -> Tensor:
    """bG + cG² of G = YYᵀ, [b, k, k]; the step is aY + (bG + cG²)Y."""
    _, b, c = quintic
    if gram.shape[-1] < TRIANGLE_FROM:  # nothing is saved by symmetry: one call for all
        return torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
    return symmetric_result(gram, gram).mul_(c).add_(gram, alpha=b)


def _first_even_part(gram: Tensor, quintic: Quintic) -> tuple[Tensor, Tensor, Tensor]:
    """The same for Y divided by about its norm, that G, and the norm."""
    _, b, c = quintic
    square = symmetric_result(gram, gram)
    length = _length(square)
    gram = gram / length**2
    return (square / length**4).mul_(c).add_(gram, alpha=b), gram, length


def _bfloat16_step(Y: Tensor, quintic: Quintic) -> Tensor:
    """One step for singular values near one, with products in bfloat16. Y is overwritten.

    With E = YYᵀ − I it is (a+b+c)Y + ((b+2c)E + cE²)Y. Only the second term is rounded, and it is
    small. Y itself stays in float32, and so does the diagonal of E, which loses most by rounding.
    """
    a, b, c = quintic
    y = Y.bfloat16()
    E = y @ y.mT
    E.diagonal(dim1=-2, dim2=-1).copy_(torch.linalg.vector_norm(Y, dim=-1).square() - 1)
    small = torch.baddbmm(E, E, E, beta=b + 2 * c, alpha=c) @ y
    return Y.mul_(a + b + c).add_(small)


def _length(square: Tensor) -> Tensor:
    """About ‖Y‖_op, from (YYᵀ)²; at least ‖Y‖_op, and 1 for Y = 0."""
    # (Σσ⁸)^(1/8) is at most k^(1/8) above σ₁, where ‖Y‖_F may be k^(1/2) above it.
    # Row by row: torch sums the squares of a large matrix in one pass, which loses digits (3e-4 of
    # the norm at side 2048, enough for the steps to diverge).
    rows = torch.linalg.vector_norm(square, dim=-1, keepdim=True)
    length = torch.linalg.vector_norm(rows, dim=-2, keepdim=True).pow(0.25)
    return torch.where(length > 0, length, 1.0)


@cache
def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether the hardware has units for bfloat16 products; emulated products would be slower."""
    if device.type == "cuda":
        return torch.cuda.is_available() and torch.cuda.is_bf16_supported(False)
    if device.type == "cpu":
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return False


# ---- as published ------------------------------------------------------------------------------


def published_polar_express(X: Tensor, steps: int) -> Tensor:
    """This many steps of Polar Express on X [b, m, n], with the scalings of its public code.

    X is divided by 1.01‖X‖_F + 1e-7, and all quintics but the limit are those of Y/1.01, so that
    rounding to bfloat16 would not take a singular value above one. Here products are in X's dtype.
    """
    tall = X.shape[-2] > X.shape[-1]
    Y = X.mT if tall else X
    Y = Y / (_MARGIN * torch.linalg.matrix_norm(Y, keepdim=True) + 1e-7)
    scaled = chain(map(_with_margin, _POLAR_EXPRESS), repeat(_LIMIT))
    for quintic in islice(scaled, steps):
        small = _even_part(symmetric_result(Y, Y.mT), quintic)
        Y = torch.baddbmm(Y, small, Y, beta=quintic[0])
    return Y.mT if tall else Y


# ---- exact -----------------------------------------------------------------------------------

# An odd quintic with p(0) = p'(0) = p'(1) = 0 and p(1) = 1. Values below .816 go to zero, values
# above go to one.
_SEPARATING: Quintic = (0.0, 2.5, -1.5)
_SEPARATING_STEPS = 4
_SEPARATED_AT = math.sqrt(2 / 3)
_WIDE_STEPS = 8  # after these, singular values of 1e-5 have grown to .1, enough for float32


@cache
def _steps_to_separation(floor: float) -> int:
    """Number of steps after which a singular value of `floor` is above the separation point."""
    sigma = floor
    for step, quintic in enumerate(_quintics()):
        if sigma >= _SEPARATED_AT:
            return step
        sigma = _value(sigma, quintic)
    raise AssertionError("unreachable")


@cache
def _separated_after(steps: int) -> float:
    """The singular value that this number of steps takes to the separation point.

    Larger ones are above it, because after all steps of `_POLAR_EXPRESS` they are near one.
    """
    low, high = 0.0, _FLOOR
    while high - low > 1e-6 * high:
        sigma = middle = (low + high) / 2
        for quintic in islice(_quintics(), steps):
            sigma = _value(sigma, quintic)
        low, high = (middle, high) if sigma < _SEPARATED_AT else (low, middle)
    return high


def exact_by_products(
    X: Tensor, *, widens: bool = True, null_up_to: Tensor | None = None
) -> Tensor:
    """Polar Express, then steps that set the null space to zero.

    If it `widens`, the first steps are in float64 where the device has it: a division in float32
    would already have an error of ε·κ. Singular values up to `null_up_to` [b] give zero as well,
    as far as it is below `_FLOOR` of the largest; values up to twice as large may.
    """
    tall = X.shape[-2] > X.shape[-1]
    wide_steps = _WIDE_STEPS if widens and has_float64(X) else 0
    Y = X.mT if tall else X
    Y = _unit(Y.double() if wide_steps else Y)
    share: Tensor | None = None
    if null_up_to is not None:
        share = (null_up_to / norm_bound(X).clamp_min(torch.finfo(X.dtype).tiny))[:, None, None]
    steps = _steps_to_separation(null_below(X.dtype))
    for step, quintic in enumerate(islice(_quintics(), steps)):
        Y = Y if step < wide_steps else Y.to(X.dtype)
        moved = _quintic_step(Y, quintic, rescaled=step == 0)
        if share is None or step < len(_POLAR_EXPRESS):
            Y = moved
        else:  # fewer steps leave larger values below the separation point
            Y = torch.where(share < _separated_after(step), moved, Y)
    Y = Y.to(X.dtype)
    for _ in range(_SEPARATING_STEPS):
        Y = _quintic_step(Y, _SEPARATING)
    return Y.mT if tall else Y


def _quintic_step(Y: Tensor, quintic: Quintic, *, rescaled: bool = False) -> Tensor:
    """aY + bYYᵀY + c(YYᵀ)²Y; `rescaled` first divides Y by about its operator norm."""
    a, b, c = quintic
    gram = Y @ Y.mT
    square = gram @ gram
    if rescaled:
        length = _length(square)
        Y, gram, square = Y / length, gram / length**2, square / length**4
    return a * Y + (b * gram + c * square) @ Y


def _unit(X: Tensor) -> Tensor:
    """X/‖X‖_F; dividing by the largest entry first keeps tiny and huge square sums in range."""
    tiny = torch.finfo(X.dtype).tiny
    X = X / X.abs().amax(dim=(-2, -1), keepdim=True).clamp_min(tiny)
    return X / torch.linalg.matrix_norm(X, keepdim=True).clamp_min(tiny)
