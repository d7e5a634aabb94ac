"""Symmetric matrices as triangles: d(d + 1)/2 numbers instead of d².

A symmetric S of side d is cut into halves of ⌈d/2⌉ and ⌊d/2⌋ rows. Its upper right quarter is kept
as it is. The lower triangle of the first quarter and the upper triangle of the last one fit into a
rectangle (LAPACK's rectangular full packed format). So there are no tables of indices, and an
accelerator never waits.
"""

import torch
from torch import Tensor

Shape = tuple[int, ...]


def packed_size(shape: Shape) -> int:
    """The numbers in `packed(S)` for S of this shape."""
    *batch, rows, columns = shape
    each = rows * (rows + 1) // 2 if rows == columns else rows * columns
    return torch.Size(batch).numel() * each


def packed(S: Tensor) -> Tensor:
    """S [..., d, d] as triangles, one dimension. A diagonal, [..., d, 1] or [..., 1, d], as it is.

    S must be symmetric; which of two mirrored numbers is kept depends on their place.
    """
    d = S.shape[-1]
    if S.shape[-2] != d or d == 1:
        return S.reshape(-1)
    half, low = d - d // 2, d // 2
    rectangle = S.new_zeros(*S.shape[:-2], low + 1, half)
    rectangle[..., low + 1 - half :, :] = S[..., :half, :half].tril()
    rectangle[..., :low, half - low :] += S[..., half:, half:].triu()
    return torch.cat([S[..., :half, half:].flatten(-2), rectangle.flatten(-2)], -1).reshape(-1)


def unpacked(numbers: Tensor, shape: Shape) -> Tensor:
    """The symmetric S of this shape with `packed(S)` = `numbers`."""
    d = shape[-1]
    if shape[-2] != d or d == 1:
        return numbers.view(shape)
    half, low = d - d // 2, d // 2
    batch = shape[:-2]
    corner, rectangle = numbers.view(*batch, -1).split([half * low, (low + 1) * half], -1)
    corner = corner.view(*batch, half, low)
    rectangle = rectangle.view(*batch, low + 1, half)
    S = numbers.new_empty(shape)
    S[..., :half, half:], S[..., half:, :half] = corner, corner.mT
    _mirror(S[..., :half, :half], rectangle[..., low + 1 - half :, :].tril())
    _mirror(S[..., half:, half:], rectangle[..., :low, half - low :].triu())
    return S


def _mirror(quarter: Tensor, triangle: Tensor) -> None:
    """Write a triangle and its mirror image into a quarter; the diagonal once."""
    quarter.copy_(triangle).add_(triangle.mT)
    quarter.diagonal(dim1=-2, dim2=-1).copy_(triangle.diagonal(dim1=-2, dim2=-1))
