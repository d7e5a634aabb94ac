"""Rows of a layer that several ranks read together, for `tensor_parallel="exact"`.

Tensor parallelism cuts the δ of a column-parallel layer and the x of a row-parallel layer into
columns, and Σ v vᵀ needs whole rows. So ranks exchange: each takes a part of the rows, and receives
their other columns. The sums of all ranks then add up to that of all rows, and no rank forms a
product twice. Of what is whole on every rank each takes its part as well, without a message.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gomuon.moments import Shape
from gomuon.parameters.rows import Rows
from gomuon.parameters.tensor_shards import INPUTS, OUTPUTS, TensorShard


@dataclass(frozen=True)
class DividedRows:
    """This rank's part of the rows of a layer.

    Attributes:
        rows: how to read the rows with the columns that this rank has, without ones.
        ones: append a one to the inputs, for a bias that joins the matrix.
        shard: how the layer is cut.
    """

    rows: Rows
    ones: bool
    shard: TensorShard

    def inputs(self, x: Tensor) -> Tensor:
        """The inputs of this rank's rows, whole."""
        rows = self._own(self.rows.inputs(x), INPUTS)
        return F.pad(rows, (0, 1), value=1.0) if self.ones else rows

    def gradients(self, g: Tensor) -> Tensor:
        """The output gradients of this rank's rows, whole."""
        return self._own(self.rows.gradients(g), OUTPUTS)

    def uses(self, g: Tensor) -> int:
        """This rank's part of the number of rows the weight was applied to."""
        return self._share(self.rows.uses(g))

    def sampled(self, g: Tensor) -> int:
        """The number of rows of `gradients(g)`."""
        return self._share(self.rows.sampled(g))

    def positions(self, y: Tensor) -> tuple[int, ...]:
        """The shape of y without its channels: one row per position."""
        return self.rows.positions(y)

    def mask_rows(self, mask: Tensor) -> Tensor:
        """A mask over the positions -> [N, 1], of this rank's rows."""
        return self._part(self.rows.mask_rows(mask))

    def own_mask(self, mask: Tensor) -> Tensor:
        """This rank's part of a mask, to count the uses."""
        return mask.flatten().tensor_split(self.shard.parts)[self.shard.index]

    def fits_output(self, y: Tensor, moment: Shape) -> bool:
        """Whether y has this rank's columns of rows for a moment of this shape."""
        return self.rows.fits_output(y, self._columns(moment, OUTPUTS))

    def fits_input(self, x: Tensor, y: Tensor, moment: Shape) -> bool:
        """Whether x has them, and as many rows as y."""
        side = moment[-1] - self.ones
        return self.rows.fits_input(x, y, self._columns((*moment[:-2], side, side), INPUTS))

    def _columns(self, moment: Shape, dim: int) -> Shape:
        """The shape of the moment of this rank's columns."""
        if self.shard.dim != dim:
            return moment
        side = moment[-1] // self.shard.parts
        return (*moment[:-2], side, side)

    def _own(self, rows: Tensor, dim: int) -> Tensor:
        if self.shard.dim != dim:
            return self._part(rows)
        return _exchanged(rows, self.shard.mesh.get_group(), self.shard.parts, self.shard.index)

    def _part(self, rows: Tensor) -> Tensor:
        """[…, N, d] -> […, N / parts, d]."""
        return rows.tensor_split(self.shard.parts, dim=-2)[self.shard.index]

    def _share(self, number: int) -> int:
        """The length of this rank's part of so many rows, as `tensor_split` has it."""
        return (number - self.shard.index + self.shard.parts - 1) // self.shard.parts


CapturedRows = Rows | DividedRows


def divided(rows: Rows, shard: TensorShard) -> DividedRows:
    """The part of these rows that this rank reads."""
    sampling = replace(rows.sampling, ones=False)
    return DividedRows(replace(rows, sampling=sampling), rows.sampling.ones, shard)


def _exchanged(rows: Tensor, group: Any, parts: int, index: int) -> Tensor:
    """[N, d] on each rank, other columns of the same rows -> [N / parts, parts·d], other rows.

    Every rank calls this in the same place of its backward pass, as it calls the messages of
    `parallelize_module` itself.
    """
    from torch import distributed

    sizes = [len(part) for part in rows.tensor_split(parts)]
    # As bytes, because not every backend sends every dtype.
    # (A single column is contiguous with any stride, but only bytes side by side can be viewed.)
    dense = rows.detach().contiguous().as_strided(rows.shape, (rows.shape[1], 1))
    sent = dense.view(torch.uint8)
    received = sent.new_empty(parts * sizes[index], sent.shape[1])
    distributed.all_to_all_single(received, sent, [sizes[index]] * parts, sizes, group=group)
    columns = received.view(rows.dtype).view(parts, sizes[index], rows.shape[1])
    return columns.movedim(0, 1).reshape(sizes[index], -1)
