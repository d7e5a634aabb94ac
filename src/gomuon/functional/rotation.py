"""How well an orthonormal basis still fits a matrix that has changed since."""

import torch
from torch import Tensor


def off_diagonal_share(S: Tensor, Q: Tensor) -> Tensor:
    """‖B − diag B‖_F / ‖B‖_F of B = QᵀSQ, [...]: zero if the columns of Q are eigenvectors of S.

    This is also ‖S − Q diag(B) Qᵀ‖_F / ‖S‖_F, the relative error of S in the cached basis, which
    Eschenhagen et al. 2025 ("Purifying Shampoo") compare with a threshold. The zero matrix has a
    share of zero: every basis fits it.

    Args:
        S: [..., d, d], symmetric.
        Q: [..., d, d], orthonormal.
    """
    scale = S.abs().amax(dim=(-2, -1), keepdim=True)  # keeps squares in range
    return share_of(Q.mT @ (S / torch.where(scale > 0, scale, 1.0)) @ Q)


def share_of(B: Tensor) -> Tensor:
    """‖B − diag B‖_F / ‖B‖_F, [...]; zero for B = 0."""
    diagonal = torch.diag_embed(B.diagonal(dim1=-2, dim2=-1))
    whole = torch.linalg.matrix_norm(B)
    # Not as a difference of squared norms, in which small shares would be rounding errors.
    off = torch.linalg.matrix_norm(B - diagonal)
    return off / torch.where(whole > 0, whole, 1.0)
