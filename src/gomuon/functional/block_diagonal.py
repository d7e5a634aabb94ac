"""Maps and factors of a side of length d in three forms, told apart by their last dimensions:

    [..., d, d]                  a whole matrix
    [..., k, s, s]               k ≥ 2 blocks of side s on the diagonal, (k − 1)·s < d ≤ k·s
    [..., d, 1] or [..., 1, d]   a diagonal, of the left side or of the right side

If k·s > d, the last block is longer than its piece of the side. Its further rows and columns are
zero outside the diagonal, so they never reach a product.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from gomuon.functional.linalg import Multiply, is_diagonal, symmetric_product


def left_product(P: Tensor, X: Tensor) -> Tensor:
    """P X for X [..., m, n] and P of the left side."""
    m = X.shape[-2]
    if P.shape[-2] == m:
        return P * X if is_diagonal(P) else P @ X
    blocks, size = P.shape[-3], P.shape[-1]
    pieces = padded(X, -2, blocks * size).unflatten(-2, (blocks, size))
    return (P @ pieces).flatten(-3, -2)[..., :m, :]


def right_product(X: Tensor, P: Tensor) -> Tensor:
    """X P for X [..., m, n] and P of the right side."""
    n = X.shape[-1]
    if P.shape[-1] == n:
        return X * P if is_diagonal(P) else X @ P
    blocks, size = P.shape[-3], P.shape[-1]
    pieces = padded(X, -1, blocks * size).unflatten(-1, (blocks, size)).movedim(-2, -3)
    return (pieces @ P).movedim(-3, -2).flatten(-2)[..., :n]


def squared(P: Tensor) -> Tensor:
    """P² in the form of P."""
    return P.square() if is_diagonal(P) else P @ P


def diagonal_of(S: Tensor, d: int) -> Tensor:
    """The diagonal of a side of length d, [..., d]."""
    if is_diagonal(S):
        return S.flatten(-2)
    diagonal = S.diagonal(dim1=-2, dim2=-1)
    return diagonal if S.shape[-1] == d else diagonal.flatten(-2)[..., :d]


def padded(X: Tensor, dim: int, length: int) -> Tensor:
    """X with zeros added at the end of its last or second last dimension, up to a length."""
    lacking = length - X.shape[dim]
    if not lacking:
        return X
    return F.pad(X, (0, lacking) if dim == -1 else (0, 0, 0, lacking))


def fill_padding_(S: Tensor, d: int) -> Tensor:
    """Set the diagonal of S beyond d to the mean of the last block's own diagonal, in place.

    Then mean eigenvalues and roots of the padded block are those of the block itself, and averages,
    shrinkage and damping keep it so.
    """
    blocks, size = S.shape[-3], S.shape[-1]
    own = d - (blocks - 1) * size
    if own < size:
        diagonal = S[..., -1, :, :].diagonal(dim1=-2, dim2=-1)
        diagonal[..., own:] = diagonal[..., :own].mean(-1, keepdim=True)
    return S


def block_moments(
    rows: Tensor, strips: int, blocks: int, multiply: Multiply = torch.matmul
) -> Tensor:
    """Σ v vᵀ of every piece of the rows, [strips, d, d] or [strips, blocks, s, s].

    Args:
        rows: [N, strips·d], or [strips, N, d] for a grouped convolution.
        strips: the number of matrices along the side.
        blocks: the number of pieces of a matrix's side d.
        multiply: see `symmetric_product`.
    """
    grouped = rows.ndim == 3
    d = rows.shape[-1] if grouped else rows.shape[-1] // strips
    size = -(-d // blocks)
    pieces = padded(rows.unflatten(-1, (-1, d)), -1, blocks * size)  # [..., N, strips or 1, d]
    pieces = pieces.flatten(-2).unflatten(-1, (-1, size)).movedim(-2, -3)
    # [strips·blocks, s, s], or [strips, blocks, s, s] for a grouped convolution
    moments = symmetric_product(pieces, multiply)
    moments = moments.reshape(strips, blocks, size, size)
    return moments if blocks > 1 else moments.squeeze(1)


def diagonal_moments(rows: Tensor, strips: int) -> Tensor:
    """Σ v² of every coordinate, [strips, d], for rows as in `block_moments`."""
    return rows.square().sum(-2).view(strips, -1)


def whole_matrix(S: Tensor, d: int) -> Tensor:
    """S as [..., d, d], whatever its form."""
    if is_diagonal(S):
        return torch.diag_embed(S.flatten(-2))
    if S.shape[-1] == d:
        return S
    whole = [torch.block_diag(*blocks) for blocks in S.flatten(0, -4)]
    return torch.stack(whole)[..., :d, :d].unflatten(0, S.shape[:-3])


def diagonal_blocks(S: Tensor, blocks: int) -> Tensor:
    """The blocks on the diagonal of S [..., d, d], [..., blocks, s, s]; the last one is padded."""
    d = S.shape[-1]
    size = -(-d // blocks)
    whole = padded(padded(S, -1, blocks * size), -2, blocks * size)
    tiles = whole.unflatten(-1, (blocks, size)).unflatten(-3, (blocks, size))
    return fill_padding_(tiles.diagonal(dim1=-4, dim2=-2).movedim(-1, -3).contiguous(), d)
