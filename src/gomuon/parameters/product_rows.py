"""Rows of products with a weight that no module stands for, such as `x @ W` or one for each expert.

The rows are those that a linear layer for each matrix would have.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor
from torch.nn import functional as F

from gomuon.parameters.rows import LinearRows
from gomuon.parameters.sampling import ALL_ROWS, Sampling


@dataclass(frozen=True)
class Arrangement:
    """How an operand becomes [positions…, matrices, side].

    Attributes:
        divided: (dimension, sizes) of dimensions to divide first, the last one first.
        order: the order of the dimensions then.
        positions: how many of them are positions.
        matrices: how many of them count matrices; those that are left are the side.
    """

    divided: tuple[tuple[int, tuple[int, ...]], ...]
    order: tuple[int, ...]
    positions: int
    matrices: int

    def __call__(self, v: Tensor) -> Tensor:
        for dim, sizes in self.divided:
            v = v.unflatten(dim, sizes)
        shape = [v.shape[dim] for dim in self.order]
        last = self.positions + self.matrices
        each, side = math.prod(shape[self.positions : last]), math.prod(shape[last:])
        return v.permute(self.order).reshape(*shape[: self.positions], each, side)


@dataclass(frozen=True)
class Piece:
    """The part of a side that a product uses, if not all of it.

    Attributes:
        begin: its first coordinate.
        side: the length of the whole side.
    """

    begin: int
    side: int

    def fill(self, v: Tensor) -> Tensor:
        """v with zeros for the other coordinates."""
        missing = self.side - self.begin - v.shape[-1]
        return F.pad(v, (self.begin, missing)) if self.begin or missing else v


class Segments:
    """Which rows belong to which matrix: given by the ends of segments, or by a number for each.

    Reading them waits for an accelerator, once for each product of a refresh step.
    """

    def __init__(self, matrices: int, ends: Tensor | None, numbers: Tensor | None) -> None:
        self._matrices = matrices
        self._ends, self._numbers = ends, numbers
        self._sizes: list[int] | None = None
        self._order: Tensor | None = None

    @property
    def sizes(self) -> list[int]:
        """The number of rows of each matrix."""
        if self._sizes is None:
            if self._ends is not None:
                ends = [0, *self._ends.tolist()]
                self._sizes = [end - begin for begin, end in pairwise(ends)]
            else:
                assert self._numbers is not None
                self._order = self._numbers.argsort(stable=True)
                self._sizes = self._numbers.bincount(minlength=self._matrices).tolist()
        return self._sizes

    def divide(self, v: Tensor) -> list[Tensor]:
        """[rows, …] for each matrix. Rows behind the last segment belong to none."""
        sizes = self.sizes
        if self._order is not None:
            v = v.index_select(0, self._order)
        return list(v[: sum(sizes)].split(sizes))


@dataclass(frozen=True)
class ProductRows:
    """Rows of a product y = x·W, for each of the matrices of W.

    Attributes:
        arrange_inputs: for x. If x is the same for all matrices, it counts one.
        arrange_gradients: for y.
        inputs_piece: the inputs of W that are used.
        gradients_piece: the outputs of W that are used.
        matrices: how many matrices of the stack.
        segments: if each matrix has rows of its own; the first position is then the row.
        sampling: which rows enter the moments.
    """

    arrange_inputs: Arrangement
    arrange_gradients: Arrangement
    inputs_piece: Piece
    gradients_piece: Piece
    matrices: int = 1
    segments: Segments | None = None
    sampling: Sampling = ALL_ROWS

    @property
    def of_inputs(self) -> tuple[object, ...]:
        """What `inputs` depends on: two products with one x and equal values have equal rows."""
        return self.arrange_inputs, self.inputs_piece, self.sampling

    @property
    def _each(self) -> LinearRows:
        return LinearRows(self.sampling)

    def inputs(self, x: Tensor) -> list[Tensor]:
        """x -> [N, n] for each matrix; the same tensor for all of them if they share x."""
        parts = self._parts(self.inputs_piece.fill(self.arrange_inputs(x)))
        rows = [self._each.inputs(part) for part in parts]
        return rows * self.matrices if len(rows) == 1 else rows

    def gradients(self, g: Tensor) -> list[Tensor]:
        """The gradient of y -> [N, m] for each matrix."""
        parts = self._parts(self.gradients_piece.fill(self.arrange_gradients(g)))
        return [self._each.gradients(part) for part in parts]

    def uses(self, g: Tensor) -> list[int]:
        """The number of rows that each matrix was applied to, before sampling."""
        return self._numbers([self._each.uses(part) for part in self._parts_of_one(g)])

    def sampled(self, g: Tensor) -> list[int]:
        """The number of rows of `gradients(g)`."""
        return self._numbers([self._each.sampled(part) for part in self._parts_of_one(g)])

    def positions(self, y: Tensor) -> tuple[int, ...]:
        """The shape of y's positions, one row for each; () if matrices have rows of their own."""
        if self.segments is not None:
            return ()
        return tuple(self.arrange_gradients(y).shape[:-2])

    def mask_rows(self, mask: Tensor) -> Tensor:
        """A mask over the positions -> [N, 1]."""
        return self._each.mask_rows(mask)

    def _parts(self, v: Tensor) -> Sequence[Tensor]:
        """[positions…, matrices, side] -> [positions…, side] for each matrix."""
        if self.segments is None:
            return v.unbind(-2)
        parts = self.segments.divide(v.squeeze(-2))
        # A linear layer for each expert sees its rows without further dimensions.
        return [part.flatten(0, -2) for part in parts]

    def _parts_of_one(self, g: Tensor) -> Sequence[Tensor]:
        """Parts whose shapes give the numbers of rows: one, if all matrices have the same."""
        v = self.arrange_gradients(g)
        return self._parts(v) if self.segments is not None else [v[..., 0, :]]

    def _numbers(self, found: list[int]) -> list[int]:
        return found * self.matrices if len(found) == 1 else found
