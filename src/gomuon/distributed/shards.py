"""Which rows of a parameter each rank has: all rows, or a shard made by fully_shard."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gomuon.distributed.ranks import Ranks
from gomuon.parameters.sharding import is_sharded, local


@dataclass(frozen=True)
class RowRanges:
    """The rows of a parameter that each rank has, and the replica that each rank belongs to."""

    rows: tuple[tuple[int, int], ...]  # [begin, end), by rank
    replicas: tuple[int, ...]  # the replica's number, by rank
    sharded: bool


def shard_rows(rows: int, shards: int) -> list[int]:
    """The number of rows of each shard, as in torch.chunk and DTensor's Shard(0)."""
    size = -(-rows // shards)
    return [max(0, min(size, rows - size * shard)) for shard in range(shards)]


def sharded_like(tensor: Tensor, like: Tensor) -> Tensor:
    """A whole tensor, sharded like `like`. Every rank has all of it, so nothing is sent."""
    from torch.distributed.tensor import Shard

    sharded = torch.zeros_like(like, dtype=tensor.dtype)
    mesh: Any = like.device_mesh  # type: ignore[attr-defined]
    placements: Any = like.placements  # type: ignore[attr-defined]
    along = next((d for d, p in enumerate(placements) if isinstance(p, Shard)), None)
    begin = 0
    if along is not None:
        sizes = shard_rows(len(tensor), mesh.mesh.shape[along])
        begin = sum(sizes[: mesh.get_coordinate()[along]])
    rows = local(sharded)
    rows.copy_(tensor[begin : begin + len(rows)] if tensor.ndim else tensor)
    return sharded


def find_row_ranges(parameter: Tensor, ranks: Ranks) -> RowRanges:
    """The rows of a parameter on every rank, computed without a message."""
    length = parameter.shape[0]
    if not is_sharded(parameter):
        everything = ((0, length),) * ranks.size
        return RowRanges(everything, tuple(range(ranks.size)), sharded=False)
    from torch.distributed.tensor import Shard

    mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
    placements: Any = parameter.placements  # type: ignore[attr-defined]
    along = next((d for d, p in enumerate(placements) if isinstance(p, Shard)), None)
    sizes = shard_rows(length, 1 if along is None else mesh.mesh.shape[along])
    rows, replicas = [(0, 0)] * ranks.size, [0] * ranks.size
    numbers: dict[tuple[int, ...], int] = {}
    for place in (mesh.mesh >= 0).nonzero().tolist():
        rank = ranks.number_of(int(mesh.mesh[tuple(place)]))
        shard = 0 if along is None else place[along]
        rest = tuple(x for d, x in enumerate(place) if d != along) if along is not None else (rank,)
        begin = sum(sizes[:shard])
        rows[rank] = (begin, begin + sizes[shard])
        replicas[rank] = numbers.setdefault(rest, len(numbers))
    return RowRanges(tuple(rows), tuple(replicas), sharded=along is not None)
