"""What the maps can make of a source's own roundoff; nothing below it is a direction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gomuon.functional.block_diagonal import left_product, right_product
from gomuon.functional.linalg import is_diagonal

# Roundoff of a source in units of ε times its norm. Measured on a GPT with LayerNorm, whose
# gradients lack one rank: at most 9 after the maps, in float32.
ROUNDOFF = 32


def null_below(dtype: torch.dtype) -> float:
    """Rounding can make singular values up to this share of the largest from zero."""
    return ROUNDOFF * torch.finfo(dtype).eps


@dataclass(frozen=True)
class MappedRoundoff:
    """Roundoff N of a source M becomes P_B N P_A, and the maps may make it large beside P_B M P_A.

    ‖N‖ is taken to be `null_below` times ‖M‖.

    Attributes:
        source: M [b, m, n].
        left: P_B [b, …] in any form; None for the identity.
        right: P_A.
    """

    source: Tensor
    left: Tensor | None
    right: Tensor | None

    @property
    def mT(self) -> MappedRoundoff:
        """Of Cᵀ = P_A Mᵀ P_B."""
        left, right = (None if P is None else P.mT for P in (self.right, self.left))
        return MappedRoundoff(self.source.mT, left, right)

    def of_matrices(self, chosen: Tensor) -> MappedRoundoff:
        """Of some matrices of the batch, by a mask [b]."""
        left, right = (None if P is None else P[chosen] for P in (self.left, self.right))
        return MappedRoundoff(self.source[chosen], left, right)

    def along(self, U: Tensor, V: Tensor) -> Tensor:
        """‖N‖·‖P_B u‖·‖P_A v‖ of every pair of columns of U [b, m, k] and V [b, n, k], [b, k].

        uᵀ(P_B N P_A)v is never larger, because P_B and P_A are symmetric.
        """
        left = U if self.left is None else left_product(self.left, U)
        right = V.mT if self.right is None else right_product(V.mT, self.right)
        lengths = torch.linalg.vector_norm(left, dim=-2) * torch.linalg.vector_norm(right, dim=-1)
        return self._null * norm_bound(self.source)[:, None] * lengths

    def bound(self) -> Tensor:
        """‖N‖·‖P_B‖_op·‖P_A‖_op, [b]: along no pair is it larger."""
        maps = _largest(self.left, norm_bound) * _largest(self.right, norm_bound)
        return self._null * norm_bound(self.source) * maps

    def rough_bound(self) -> Tensor:
        """The same without a product: some times larger, [b]."""
        maps = _largest(self.left, _row_sums) * _largest(self.right, _row_sums)
        return self._null * torch.linalg.matrix_norm(self.source) * maps

    @property
    def _null(self) -> float:
        return null_below(self.source.dtype)


def norm_bound(X: Tensor) -> Tensor:
    """(Σσ⁸)^(1/8) of X [..., m, n], [...]: at least ‖X‖_op, and at most k^(1/8) times it."""
    scale = X.abs().amax(dim=(-2, -1), keepdim=True).clamp_min(torch.finfo(X.dtype).tiny)
    Y = X / scale  # so that the eighth powers stay in range
    Y = Y if Y.shape[-2] <= Y.shape[-1] else Y.mT
    gram = Y @ Y.mT
    return torch.linalg.matrix_norm(gram @ gram).pow(0.25) * scale[..., 0, 0]


def _row_sums(P: Tensor) -> Tensor:
    """The largest sum of absolute values of a row, [...]: at least ‖P‖_op of a symmetric P."""
    return P.abs().sum(-1).amax(-1)


def _largest(P: Tensor | None, norm: Callable[[Tensor], Tensor]) -> Tensor | float:
    """At least ‖P‖_op of every map, [b]."""
    if P is None:
        return 1.0
    if is_diagonal(P):
        return P.abs().flatten(1).amax(1)
    bounds = norm(P)
    return bounds.amax(1) if P.ndim == 4 else bounds
