"""Orthonormal bases by matrix products alone: Gram–Schmidt, and orthogonal iteration.

Nothing is decomposed, nothing is computed in another precision, and nothing waits for the device.
"""

import math

import torch
from torch import Tensor

from gomuon.functional.linalg import identity_like

PANEL = 32  # columns that are taken one by one, after products with all earlier columns


def orthonormalised(X: Tensor) -> Tensor:
    """Q of X = QR for X [..., d, d], up to the signs of its columns: here R has none below zero.

    Panels of columns are made orthogonal to all earlier columns, and then to each other, column by
    column. Both are done twice, so Q is orthonormal to a few roundoffs, however ill-conditioned X
    is. A column that depends on earlier ones up to rounding has no direction of its own, and a
    fixed vector takes its place. So Q is orthonormal for a singular X as well, even for zero. If a
    matrix holds NaN or infinity, its Q is not finite.
    """
    d = X.shape[-1]
    X, spares = _unit_columns(X), _unit_columns(_spares(X)).expand_as(X)
    Q = torch.empty_like(X, memory_format=torch.contiguous_format)
    for begin in range(0, d, PANEL):
        end = min(begin + PANEL, d)
        earlier, own = Q[..., :begin], [Y[..., begin:end] for Y in (X, spares)]
        columns = torch.stack(own, dim=-1).flatten(-2)  # a spare after each column
        columns = _one_by_one(_without(earlier, columns), spare=True)
        # If little was left of a column, rounding errors along the others are a part of it now.
        Q[..., begin:end] = _one_by_one(_without(earlier, columns), spare=False)
    return Q


def gram_schmidt_products(d: int) -> list[tuple[int, int, int]]:
    """The products [m, k]·[k, n] of `orthonormalised` for each matrix, as m, k and n."""
    shapes = []
    for begin in range(0, d, PANEL):
        width = min(PANEL, d - begin)
        for each in (2, 1):  # with and without spares
            shapes += [(begin, d, each * width), (d, begin, each * width)] if begin else []
            for left in range(each * (width - 1), 0, -each):
                shapes += [(1, d, left), (d, 1, left)]
    return shapes


def _one_by_one(columns: Tensor, *, spare: bool) -> Tensor:
    """Each column [..., d, 1] is normalised and taken out of those after it.

    With `spare`, every other column is only used if the one before it vanishes.
    """
    limits = torch.finfo(columns.dtype)
    # Rounding errors are as large as what is left of a unit vector that depends on the others.
    vanished = 2 * math.sqrt(columns.shape[-2]) * limits.eps
    each = 2 if spare else 1
    found: list[Tensor] = []
    while True:
        first, columns = columns[..., :each], columns[..., each:]
        length = torch.linalg.vector_norm(first, dim=-2, keepdim=True)
        q = first / length.clamp_min(limits.tiny)
        if spare:  # a length of NaN is not replaced
            q = torch.where(length[..., :1] <= vanished, q[..., 1:], q[..., :1])
        found.append(q)
        if not columns.shape[-1]:
            return torch.cat(found, dim=-1)
        columns = _without(q, columns)


def _without(Q: Tensor, X: Tensor) -> Tensor:
    """X − QQᵀX."""
    return X - Q @ (Q.mT @ X) if Q.shape[-1] else X


def _unit_columns(X: Tensor) -> Tensor:
    """Columns of length one; columns of zeros stay."""
    for norm in (torch.inf, 2):  # the first keeps the squares of the second in range
        length = torch.linalg.vector_norm(X, norm, dim=-2, keepdim=True)
        X = X / torch.where(length == 0, 1.0, length)
    return X


_PRIME = 2**31 - 1


def _spares(like: Tensor) -> Tensor:
    """Pseudo-random numbers [d, d], the same on every device. A generator would have to be seeded.

    Squares of integers modulo a prime, over and over.
    """
    k = torch.arange(1, like.shape[-1] + 1, device=like.device)
    number = 65539 * k.unsqueeze(-1) + k
    for _ in range(4):
        number = (number * number + 7) % _PRIME
    return number.to(like.dtype) / _PRIME - 0.5


# ---- orthogonal iteration ------------------------------------------------------------------------

FIRST_STEPS = 20  # from the identity
LATER_STEPS = 2  # from a basis of a similar matrix


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
    """Rayleigh quotients diag(VᵀSV), largest first, and columns (or the image SV) in their order."""
    quotients, order = (V * image).sum(-2).sort(dim=-1, descending=True)
    columns = image if columns is None else columns
    return quotients, torch.take_along_dim(columns, order.unsqueeze(-2), dim=-1)
