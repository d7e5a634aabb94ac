"""Inverse roots by matrix products alone.

Nothing is decomposed, nothing is computed in another precision, and nothing waits for the device.

The inverse root of order r of P₀ is found by quadratic polynomials: W = aI + bP + cP², X ← XW,
P ← W^r P, from X = I. So P = X^r P₀ after every step, and once P is the identity, X is P₀^(−1/r).
Each polynomial is the best one for the interval that holds the eigenvalues of P by then, as in
Polar Express (Amsel et al. 2025) for the polar factor.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache

import torch
from torch import Tensor

from gomuon.functional.linalg import identity_like

Quadratic = tuple[float, float, float]


@dataclass(frozen=True)
class _Range:
    """What the products of a dtype can resolve.

    Attributes:
        reach: eigenvalues are inverted down to this share of the largest.
        least: the smallest share that a shift may ask for instead.
        tolerance: the largest relative error of the root that the polynomials may leave.
    """

    reach: float
    least: float
    tolerance: float


# More reach costs more than steps: polynomials for a wide interval take all eigenvalues through
# small values, where rounding errors weigh more, whatever the matrix's own condition number.
_RANGES = {
    torch.float32: _Range(reach=1e-5, least=1e-6, tolerance=1e-5),
    torch.float64: _Range(reach=1e-9, least=1e-12, tolerance=1e-11),
}
_LARGEST_ORDER = 100


def product_root(S: Tensor, power: float, shift: float = 0.0) -> tuple[Tensor, Tensor]:
    """(S + shift·λ_max·I)^(−power) of S [..., d, d], and which of them can be trusted, [...].

    Power ¼ gives the maps of Equation (29).

    Without a shift, eigenvalues above 1e-5·ρ (float64: 1e-9·ρ) with ρ = tr(S⁴)^(1/4) ≥ λ_max are
    inverted to a relative error of about 1e-5 (1e-10), if their own rounding errors are not larger.
    Below, there is a smooth floor: no eigenvalue counts as less than about 1e-6·ρ (1e-10·ρ), even
    if rounding made it negative. The zero matrix gives the identity, because it has no scale.

    A root cannot be trusted if it or S is not finite, or if S has so large negative eigenvalues,
    or its products so large errors, that the iteration diverges.

    Args:
        S: symmetric positive semi-definite, float32 or float64.
        power: at least 0. The nearest fraction with a denominator up to 100 is taken, so powers
            with two decimals are exact.
        shift: at least 0. λ_max is estimated by power iteration, to a few per cent.
    """
    times, order = _fraction(power)
    if not (times and S.numel()):
        return identity_like(S).expand_as(S).clone(), S.sum(dim=(-2, -1)).isfinite()
    quadratics, highest = _steps(order, *_goal(S.dtype, shift))
    P, square, scales = _normalised(S, shift)
    X = _evaluated(quadratics[0], P, square)
    W = X
    for quadratic in quadratics[1:]:
        P = _multiplied(P, W, order)
        square = P @ P
        W = _evaluated(quadratic, P, square)
        X = X @ W
    # The eigenvalues p of the last P are in [0, highest] for every matrix that can be trusted.
    bound = 1.25 * max(0.25, highest**2 - highest) * math.sqrt(S.shape[-1])
    steady = torch.linalg.matrix_norm(square - P) <= bound
    X = _to_the(X, times)
    for scale in scales:  # not multiplied with each other: that may overflow
        X = X * scale.pow(-times / order)
    X = torch.where(scales[0] > 0, (X + X.mT) / 2, identity_like(S))
    return X, steady & X.sum(dim=(-2, -1)).isfinite()


def product_count(power: float, dtype: torch.dtype, shift: float = 0.0) -> int:
    """The number of products that `product_root` makes for each matrix."""
    times, order = _fraction(power)
    if not times:
        return 0
    steps = len(_steps(order, *_goal(dtype, shift))[0])
    multiplied = 1 if order == 1 else _power_count(order // 2) + 2 + order % 2
    return steps + (steps - 1) * (1 + multiplied) + _power_count(times)


# ---- products ------------------------------------------------------------------------------------


def _normalised(S: Tensor, shift: float) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """P = (S + shift·λ_max·I)/length with eigenvalues in [0, 1], P², and two scales.

    The product of the scales is `length`. The first one is zero for the zero matrix.
    """
    entry = S.abs().amax(dim=(-2, -1), keepdim=True)  # keeps the squares below in range
    P = S / torch.where(entry > 0, entry, 1.0)
    square = P @ P
    # (Σλ⁴)^(1/4) is at most d^(1/4) above λ_max, where ‖S‖_F may be d^(1/2) above it.
    length = torch.linalg.matrix_norm(square, keepdim=True).sqrt()
    length = torch.where(length > 0, length, 1.0)
    if not shift:
        return P / length, square / length**2, (entry, length)
    lifted = shift * _largest_eigenvalue(P, square)
    length = length + lifted
    square = (square + 2 * lifted * P) / length**2
    P, lifted = P / length, lifted / length
    square.diagonal(dim1=-2, dim2=-1).add_(lifted.squeeze(-1) ** 2)
    P.diagonal(dim1=-2, dim2=-1).add_(lifted.squeeze(-1))
    return P, square, (entry, length)


_POWER_STEPS = 8


def _largest_eigenvalue(P: Tensor, square: Tensor) -> Tensor:
    """λ_max from below, [..., 1, 1], by power iteration with P²."""
    # The column of P² with the longest diagonal entry has a share of the first eigenvector.
    first = square.diagonal(dim1=-2, dim2=-1).argmax(-1, keepdim=True).unsqueeze(-1)
    v = torch.take_along_dim(square, first, dim=-1)
    tiny = torch.finfo(P.dtype).tiny
    for _ in range(_POWER_STEPS):
        v = v / torch.linalg.vector_norm(v, dim=-2, keepdim=True).clamp_min(tiny)
        v = (square * v.mT).sum(-1, keepdim=True)  # P²v; as a product it would be no faster
    v = v / torch.linalg.vector_norm(v, dim=-2, keepdim=True).clamp_min(tiny)
    return ((P * v.mT).sum(-1, keepdim=True) * v).sum(-2, keepdim=True)


def _evaluated(quadratic: Quadratic, P: Tensor, square: Tensor) -> Tensor:
    """aI + bP + cP²."""
    a, b, c = quadratic
    W = (b * P).add_(square, alpha=c)
    W.diagonal(dim1=-2, dim2=-1).add_(a)
    return W


def _multiplied(P: Tensor, W: Tensor, order: int) -> Tensor:
    """W^order P. W is on both sides, because rounding then leaves P symmetric."""
    if order == 1:
        return W @ P
    half = _to_the(W, order // 2)
    P = half @ P @ half
    return W @ P if order % 2 else P


def _to_the(X: Tensor, exponent: int) -> Tensor:
    """X^exponent, for exponents from 1 on."""
    result = None
    while True:
        if exponent % 2:
            result = X if result is None else result @ X
        exponent //= 2
        if not exponent:
            assert result is not None
            return result
        X = X @ X


def _power_count(exponent: int) -> int:
    """The number of products of `_to_the`."""
    return exponent.bit_length() + exponent.bit_count() - 2


def _fraction(power: float) -> tuple[int, int]:
    """Numerator and denominator."""
    fraction = Fraction(float(power)).limit_denominator(_LARGEST_ORDER)
    return fraction.numerator, fraction.denominator


# ---- polynomials ---------------------------------------------------------------------------------


def _goal(dtype: torch.dtype, shift: float) -> tuple[float, float]:
    """The smallest eigenvalue to invert, where the largest is at most one, and the tolerance."""
    known, shift = _RANGES[dtype], float(shift)
    # The largest may be as small as d^(−1/4), but is hardly ever below one half.
    return max(shift / (2 + shift), known.least) if shift else known.reach, known.tolerance


@cache
def _steps(order: int, smallest: float, tolerance: float) -> tuple[tuple[Quadratic, ...], float]:
    """Polynomials that take eigenvalues in [smallest, 1] to one, and how large they get at most.

    After a step with the largest error e, |w·p^(1/r) − 1| ≤ e, they are in [(1−e)^r, (1+e)^r].
    """
    low, high = smallest, 1.0
    quadratics: list[Quadratic] = []
    while True:
        quadratic, error = _best(low, high, order)
        quadratics.append(quadratic)
        if error <= tolerance:
            return tuple(quadratics), high
        low, high = (1 - error) ** order, (1 + error) ** order


_NARROW = 1e-2  # an interval around one, below which the best polynomial is Taylor's to 1e-7


def _best(low: float, high: float, order: int) -> tuple[Quadratic, float]:
    """a, b, c with the least error e = max |(a + bp + cp²)·p^(1/r) − 1| on [low, high], and e."""
    s = 1 / order
    if high - low < _NARROW:
        far = max(high - 1, 1 - low)
        taylor = (1 + s + s * (s + 1) / 2, -s - s * (s + 1), s * (s + 1) / 2)
        return taylor, s * (s + 1) * (s + 2) / 6 * far**3 / (1 - far) ** (s + 3)
    # Remez: the error has the same size and changing signs at both ends and at two points between
    # them, where its derivative s·a + (1+s)·b·p + (2+s)·c·p² is zero.
    inner = (low + 0.1 * (high - low), low + 0.75 * (high - low))
    for _ in range(100):
        points = (low, *inner, high)
        rows = [
            [p**s, p ** (1 + s), p ** (2 + s), (-1.0) ** index, 1.0]
            for index, p in enumerate(points)
        ]
        a, b, c, error = _solved(rows)
        middle = -(1 + s) * b / (2 * (2 + s) * c)
        apart = math.sqrt(max(middle**2 - s * a / ((2 + s) * c), 0.0))
        moved = (middle - apart, middle + apart)
        settled = math.dist(moved, inner) < 1e-12 * high
        inner = moved
        if settled:
            break
    return (a, b, c), abs(error)


def _solved(rows: Sequence[list[float]]) -> list[float]:
    """The solution of linear equations, each a row that ends with its right-hand side."""
    rows = list(rows)
    for column in range(len(rows)):
        pivot = max(range(column, len(rows)), key=lambda index: abs(rows[index][column]))
        rows[column], rows[pivot] = rows[pivot], rows[column]
        first = rows[column] = [value / rows[column][column] for value in rows[column]]
        for index, row in enumerate(rows):
            if index != column:
                rows[index] = [x - row[column] * y for x, y in zip(row, first, strict=True)]
    return [row[-1] for row in rows]
