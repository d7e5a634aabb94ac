"""Sides of a matrix that have a block-diagonal or diagonal factor, as plain loops over pieces."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gomuon.lab.bench.plain_loop import second_moment


@dataclass(frozen=True)
class CutSide:
    """The lengths of a side's pieces; empty if it is whole. `diagonal`: nothing but a diagonal."""

    lengths: tuple[int, ...] = ()
    diagonal: bool = False

    def moment(self, rows: Tensor) -> Tensor:
        """E[v vᵀ], zero outside the blocks or the diagonal."""
        S = second_moment(rows)
        return torch.diag(S.diagonal()) if self.diagonal else self.each(lambda block: block, S)

    def each(self, function: Callable[[Tensor], Tensor], S: Tensor) -> Tensor:
        """The function of every block, as one block-diagonal matrix."""
        result, begin = torch.zeros_like(S), 0
        for length in self.lengths or (len(S),):
            piece = slice(begin, begin + length)
            result[piece, piece] = function(S[piece, piece])
            begin += length
        assert begin == len(S)
        return result


WHOLE = CutSide()
