"""Which part of a parameter each rank has: all of it, or a shard made by fully_shard."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from gomuon.distributed.ranks import Ranks
from gomuon.moments import Shape
from gomuon.parameters.sharding import is_sharded, local
from gomuon.parameters.tensor_shards import TensorShard


@dataclass(frozen=True)
class RowRanges:
    """The rows of a parameter that each rank has, and the replica that each rank belongs to.

    Ranks that divide the inputs of a layer have some of the columns of their rows.
    """

    rows: tuple[tuple[int, int], ...]  # [begin, end), by rank
    row_shape: Shape  # of a whole row
    replicas: tuple[int, ...]  # the replica's number, by rank
    sharded: bool
    columns: tuple[tuple[int, int], ...] = ()  # [begin, end), by rank; empty: all of them

    def shape(self, rank: int) -> Shape:
        """The shape of a rank's part."""
        begin, end = self.rows[rank]
        if not self.columns:
            return (end - begin, *self.row_shape)
        first, last = self.columns[rank]
        return (end - begin, last - first, *self.row_shape[1:])

    def part(self, whole: Tensor, rank: int) -> Tensor:
        """A rank's part of the whole tensor."""
        begin, end = self.rows[rank]
        if not self.columns:
            return whole[begin:end]
        first, last = self.columns[rank]
        return whole[begin:end, first:last]

    def joined(self, ranks: Sequence[int], parts: Sequence[Tensor]) -> Tensor:
        """The whole tensor, given the parts of all ranks of a replica, sorted by first row."""
        if not self.columns:
            return torch.cat(tuple(parts))
        rows = max(end for _, end in self.rows)
        whole = parts[0].new_empty(rows, *self.row_shape)
        for rank, part in zip(ranks, parts, strict=True):
            self.part(whole, rank).copy_(part)
        return whole


def shard_rows(rows: int, shards: int) -> list[int]:
    """The number of rows of each shard, as in torch.chunk and DTensor's Shard(0)."""
    size = -(-rows // shards)
    return [max(0, min(size, rows - size * shard)) for shard in range(shards)]


def sharded_like(tensor: Tensor, like: Tensor) -> Tensor:
    """A whole tensor, sharded like `like`. Every rank has all of it, so nothing is sent."""
    from torch.distributed.tensor import Replicate

    sharded = torch.zeros_like(like, dtype=tensor.dtype)
    mesh: Any = like.device_mesh  # type: ignore[attr-defined]
    placements: Any = like.placements  # type: ignore[attr-defined]
    part = tensor
    # From the last: `fully_shard` divides the rows of what tensor parallelism has divided.
    for along, placement in reversed(list(enumerate(placements))):
        if not isinstance(placement, Replicate) and tensor.ndim:
            sizes = shard_rows(part.shape[placement.dim], mesh.mesh.shape[along])
            part = part.split(sizes, placement.dim)[mesh.get_coordinate()[along]]
    local(sharded).copy_(part)
    return sharded


def find_row_ranges(
    parameter: Tensor, ranks: Ranks, shards: Mapping[Tensor, TensorShard] = MappingProxyType({})
) -> RowRanges:
    """The rows of a parameter on every rank, computed without a message.

    With `shards`, the rows of this rank's block, on the ranks that have the same block.
    """
    place = shards.get(parameter)
    length, *row_shape = parameter.shape if place is None else place.shape(parameter)
    divides = None if place is None else place.along
    if not is_sharded(parameter) or parameter.device_mesh.ndim == (divides is not None):  # type: ignore[attr-defined]
        everything = ((0, length),) * ranks.size
        return RowRanges(everything, tuple(row_shape), tuple(range(ranks.size)), sharded=False)
    from torch.distributed.tensor import Replicate

    mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
    placements: Any = parameter.placements  # type: ignore[attr-defined]
    cuts = [d for d, p in enumerate(placements) if d != divides and not isinstance(p, Replicate)]
    along = cuts[0] if cuts else None
    sizes = shard_rows(length, 1 if along is None else mesh.mesh.shape[along])
    rows, replicas = [(0, 0)] * ranks.size, [0] * ranks.size
    numbers: dict[tuple[int, ...], int] = {}
    for spot in (mesh.mesh >= 0).nonzero().tolist():
        if divides is not None and spot[divides] != mesh.get_coordinate()[divides]:
            continue  # a rank with another block
        rank = ranks.number_of(int(mesh.mesh[tuple(spot)]))
        shard = 0 if along is None else spot[along]
        rest = tuple(x for d, x in enumerate(spot) if d != along) if along is not None else (rank,)
        begin = sum(sizes[:shard])
        rows[rank] = (begin, begin + sizes[shard])
        replicas[rank] = numbers.setdefault(rest, len(numbers))
    return RowRanges(tuple(rows), tuple(row_shape), tuple(replicas), sharded=along is not None)
