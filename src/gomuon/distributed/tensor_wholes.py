"""Tensor parallelism that is exact: whole matrices are gathered at their owners.

The ranks of all dimensions are one team with owners, as under `fully_shard`; only that a rank may
have a rectangle of a matrix, and not only rows. Each rank's captured sums are those of its part of
the rows (`parameters/divided_rows.py`), so they add up over all ranks as ever.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gomuon.distributed.owners import Owners
from gomuon.distributed.ranks import Ranks
from gomuon.distributed.shards import RowRanges, shard_rows
from gomuon.distributed.team import Captured, Group, LocalCheck
from gomuon.parameters.sharding import is_sharded
from gomuon.parameters.tensor_shards import TensorShard, add_up_gradients


@dataclass(frozen=True)
class Grid:
    """The ranks of a team as points of a grid, whose last dimension divides the layers.

    Attributes:
        sizes: the length of each dimension.
        points: the coordinates of every rank.
        names: the names of the dimensions, as far as their mesh has them.
    """

    sizes: tuple[int, ...]
    points: tuple[tuple[int, ...], ...]
    names: tuple[str, ...]

    def placements(self, parameter: Tensor) -> list[int | None]:
        """The dimension of the parameter that each dimension of the grid cuts; None: no cut."""
        found: list[int | None] = [None] * len(self.sizes)
        if not is_sharded(parameter):
            return found
        from torch.distributed.tensor import Replicate

        mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
        names = mesh.mesh_dim_names or ()
        whole = len(found) - mesh.ndim if not names else 0
        for place, placement in enumerate(parameter.placements):  # type: ignore[attr-defined]
            if not isinstance(placement, Replicate):
                along = self.names.index(names[place]) if names else whole + place
                found[along] = placement.dim
        return found


def mesh_of(shards: Mapping[Tensor, TensorShard]) -> Any:
    """The mesh of all ranks that have parts of the parameters."""
    divided = (p for p, shard in shards.items() if shard.along is not None)
    mesh: Any = next(divided).device_mesh  # type: ignore[attr-defined]
    return mesh


def grid_of(mesh: Any, ranks: Ranks) -> Grid:
    """The grid of these ranks.

    If there are several meshes of one dimension, the ranks of one have the same place in a first
    dimension, over which gradients are averaged. All ranks call this at the same time then.

    Raises:
        ValueError: the ranks are not those of the mesh, nor of several.
    """
    sizes, names = tuple(mesh.mesh.shape), tuple(mesh.mesh_dim_names or ())
    spots = {
        int(mesh.mesh[tuple(spot)]): tuple(spot) for spot in (mesh.mesh >= 0).nonzero().tolist()
    }
    numbers = [ranks.global_rank(rank) for rank in range(ranks.size)]
    if spots.keys() == set(numbers):
        return Grid(sizes, tuple(spots[number] for number in numbers), names)
    if mesh.ndim == 1 and ranks.size % mesh.size() == 0:
        table = ranks.gather([float(mesh.mesh[0]), float(mesh.get_local_rank())])
        first = sorted({int(row[0]) for row in table})
        points = [(first.index(int(start)), int(index)) for start, index in table]
        if len(set(points)) == ranks.size and len(first) * mesh.size() == ranks.size:
            return Grid((len(first), *sizes), tuple(points), ("copies", *names))
    raise ValueError(
        f"layers are divided over a mesh of {mesh.size()} ranks, but the process group has "
        f"{ranks.size} others; pass process_group= with the group of exactly the ranks that train "
        "this model"
    )


def row_ranges_on(grid: Grid, shape: Sequence[int], cuts: Sequence[int | None]) -> RowRanges:
    """The part of a tensor that each rank has, if dimensions of the grid cut it in this way."""
    parts = [_part(grid, shape, cuts, point) for point in grid.points]
    numbers: dict[tuple[int, ...], int] = {}
    replicas = []
    for point in grid.points:
        rest = tuple(x for x, cut in zip(point, cuts, strict=True) if cut is None)
        replicas.append(numbers.setdefault(rest, len(numbers)))
    return RowRanges(
        rows=tuple(part[0] for part in parts),
        row_shape=tuple(shape[1:]),
        replicas=tuple(replicas),
        sharded=any(cut is not None for cut in cuts),
        columns=tuple(part[1] for part in parts) if 1 in cuts else (),
    )


def _part(
    grid: Grid, shape: Sequence[int], cuts: Sequence[int | None], point: Sequence[int]
) -> list[tuple[int, int]]:
    """[begin, end) of each dimension of a tensor, for the rank at a point of the grid."""
    part = [(0, length) for length in shape]
    # From the last: `fully_shard` divides the rows of what tensor parallelism has divided.
    for cut, size, place in reversed(list(zip(cuts, grid.sizes, point, strict=True))):
        if cut is not None:
            begin, end = part[cut]
            sizes = shard_rows(end - begin, size)
            begin += sum(sizes[:place])
            part[cut] = (begin, begin + sizes[place])
    return part


class Wholes(Owners):
    """A team with owners whose ranks have rectangles of the matrices.

    Args:
        ranks: all ranks that train the model.
        shards: the places of parameters in tensor parallelism.
        grid: the ranks as points of a grid.
        own: parameters that only this rank has.
    """

    def __init__(
        self,
        ranks: Ranks,
        shards: Mapping[Tensor, TensorShard],
        grid: Grid,
        own: Collection[Tensor] = (),
    ) -> None:
        super().__init__(ranks, shards, own)
        self.averaged = ranks.size // grid.sizes[-1]
        self._grid = grid

    def agree(
        self, check: LocalCheck, method: str, groups: Sequence[Group]
    ) -> tuple[str | None, Captured]:
        add_up_gradients(groups)
        return super().agree(check, method, groups)

    def _find_row_ranges(self, tensor: Tensor) -> RowRanges:
        return row_ranges_on(self._grid, tensor.shape, self._grid.placements(tensor))
