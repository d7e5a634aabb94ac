"""Orthonormal bases by matrix products alone: Gram–Schmidt, and orthogonal iteration.

Nothing is decomposed, nothing is computed in another precision, and nothing waits for the device.
"""

import math

import torch
from torch import Tensor

from gomuon.functional.linalg import identity_like

PANEL = 32  # columns that are taken one by one, after products with all earlier columns


def orthonormalised(X: Tensor) -> Tensor:
    """Q of X = QR for X [..., d, k], k ≤ d, up to the signs of its columns: R has none below zero.

    Blocked Gram–Schmidt. A panel of columns is made orthogonal to all earlier columns, and then its
    own columns to each other, one by one. If little is left of a column, rounding errors along the
    others are a part of it, so all of this is done twice. Then Q is orthonormal to a few roundoffs,
    however ill-conditioned X is. A column that depends on earlier ones up to rounding has no
    direction of its own, and a fixed vector takes its place. So Q is orthonormal for a singular X
    as well, even for zero. If a matrix holds NaN or infinity, its Q is not finite.
    """
    k, shape = X.shape[-1], X.shape
    X = _unit_columns(X.reshape(-1, *shape[-2:]))
    # A spare after each column.
    columns = torch.stack([X, _unit_columns(spread_numbers(X)).expand_as(X)], dim=-1).flatten(-2)
    Q = torch.empty_like(X, memory_format=torch.contiguous_format)
    for begin in range(0, k, PANEL):
        earlier, end = Q[..., :begin], min(begin + PANEL, k)
        panel = _one_by_one(_without(earlier, columns[..., 2 * begin : 2 * end]), spares=True)
        Q[..., begin:end] = _one_by_one(_without(earlier, panel))
    return Q.view(shape)


def gram_schmidt_products(d: int, columns: int | None = None) -> list[tuple[int, int, int]]:
    """The products [m, k]·[k, n] of `orthonormalised` for each matrix, as m, k and n."""
    shapes = []
    columns = d if columns is None else columns
    for begin in range(0, columns, PANEL):
        width = min(PANEL, columns - begin)
        for each in (2, 1):  # with and without spares
            shapes += _without_products(d, begin, each * width)
            for found in range(width):
                shapes += 2 * _without_products(d, found, each)
    return shapes


def _one_by_one(columns: Tensor, *, spares: bool = False) -> Tensor:
    """Each column of [b, d, k] is made orthogonal to those before it, twice, and normalised.

    With `spares` every other column is one. It is used if the column before it vanishes.
    """
    limits, each = torch.finfo(columns.dtype), 2 if spares else 1
    # What is left of a unit vector that depends on the others is as large as rounding errors.
    vanished = 8 * math.sqrt(columns.shape[-2]) * limits.eps
    Q = columns.new_empty(*columns.shape[:-1], columns.shape[-1] // each)
    for index, own in enumerate(columns.split(each, dim=-1)):
        found = Q[..., :index]
        own = _without(found, _without(found, own))
        length = torch.linalg.vector_norm(own, dim=-2, keepdim=True)
        q = own / length.clamp_min(limits.tiny)
        if spares:  # a length of NaN is no small one, and its column stays
            q = torch.where(length[..., :1] <= vanished, q[..., 1:], q[..., :1])
        Q[..., index : index + 1] = q
    return Q


def _without(Q: Tensor, X: Tensor) -> Tensor:
    """X − QQᵀX."""
    return X.baddbmm(Q, Q.mT.bmm(X), alpha=-1) if Q.shape[-1] else X


def _without_products(d: int, found: int, columns: int) -> list[tuple[int, int, int]]:
    return [(found, d, columns), (d, found, columns)] if found else []


def _unit_columns(X: Tensor) -> Tensor:
    """Columns of length one; columns of zeros stay."""
    for norm in (torch.inf, 2):  # the first keeps the squares of the second in range
        length = torch.linalg.vector_norm(X, norm, dim=-2, keepdim=True)
        X = X / torch.where(length == 0, 1.0, length)
    return X


_PRIME = 2**31 - 1


def spread_numbers(like: Tensor) -> Tensor:
    """Pseudo-random numbers [d, k], the same on every device. A generator would have to be seeded.

    Squares of integers modulo a prime, over and over.
    """
    rows, columns = (torch.arange(1, size + 1, device=like.device) for size in like.shape[-2:])
    number = 65539 * rows.unsqueeze(-1) + columns
    for _ in range(4):
        number = (number * number + 7) % _PRIME
    return number.to(like.dtype) / _PRIME - 0.5


# ---- orthogonal iteration ------------------------------------------------------------------------

# Steps from the identity. With eigenvalues 1/√i, 1/i or 1/i², (S + I/10)⁻¹ is then off by 2 %
# (tests/functional/test_orthonormal.py), and K-FAC's first direction by less than 5 %.
FIRST_STEPS = 20
# Steps from the basis of a similar matrix. K-FAC's directions stay within 13 % if every step
# refreshes, and within 26 % if every tenth does (tests/methods/test_bases_by_products.py).
LATER_STEPS = 2


def eigenbasis(S: Tensor, steps: int, start: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Estimates of the eigenvalues [..., d] and eigenvectors of S [..., d, d], largest first.

    Orthogonal iteration: V ← Q of SV, with columns in the order of their Rayleigh quotients, which
    are the values. It separates eigenvalues λ > μ by the factor (μ/λ)^steps: eigenvectors of nearly
    equal ones stay mixed. V diag(f(values)) Vᵀ is positive definite for every positive function f,
    and differs from f(S) little, because mixed eigenvectors have nearly equal values.

    Args:
        S: symmetric positive semi-definite, float32 or float64.
        steps: how often S is applied.
        start: the basis to start from; the identity if None.
    """
    scale = S.abs().amax(dim=(-2, -1), keepdim=True)  # keeps products in range
    S = S / torch.where(scale == 0, 1.0, scale)
    V = identity_like(S).expand_as(S) if start is None else start
    image = S @ V
    for _ in range(steps):
        V = orthonormalised(_sorted(V, image)[1])
        image = S @ V
    values, V = _sorted(V, image, V)
    return values * scale.squeeze(-1), V


def eigenbasis_products(d: int, steps: int) -> list[tuple[int, int, int]]:
    """The products [m, k]·[k, n] of `eigenbasis` for each matrix, as m, k and n."""
    return (steps + 1) * [(d, d, d)] + steps * gram_schmidt_products(d)


def _sorted(V: Tensor, image: Tensor, columns: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Rayleigh quotients diag(VᵀSV), largest first, and columns, or SV, in the same order."""
    quotients, order = (V * image).sum(-2).sort(dim=-1, descending=True)
    columns = image if columns is None else columns
    return quotients, torch.take_along_dim(columns, order.unsqueeze(-2), dim=-1)
