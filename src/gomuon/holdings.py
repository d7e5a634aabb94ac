"""Which rank holds which rows of a parameter: all of them, or a shard as fully_shard makes it."""

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gomuon.ranks import Ranks
from gomuon.traffic import shard_rows


@dataclass(frozen=True)
class Holding:
    """Rows [begin, end) of a parameter on every rank, and which ranks together hold all of it."""

    rows: tuple[tuple[int, int], ...]
    replicas: tuple[int, ...]  # of every rank, the number of the replica it belongs to
    sharded: bool


def is_sharded(parameter: Tensor) -> bool:
    # Whoever has made a sharded tensor has loaded its module, which takes as long as torch itself.
    placements = sys.modules.get("torch.distributed.tensor")
    return placements is not None and isinstance(parameter, placements.DTensor)


def is_fully_sharded(module: object) -> bool:
    """Whether fully_shard was called on a module; told by name, for importing FSDP is slow."""
    return any(base.__name__ == "FSDPModule" for base in type(module).__mro__)


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor; its own memory, not a copy."""
    here: Tensor = tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return here


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor; a message among its ranks where it is sharded."""
    all_of_it: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return all_of_it


def placed(tensor: Tensor, like: Tensor) -> Tensor:
    """A whole tensor sharded as `like` is; every rank has all of it, so nothing is sent."""
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


def local_gradient(parameter: Tensor) -> Tensor | None:
    return None if parameter.grad is None else local(parameter.grad)


def refusal(name: str, parameter: Tensor) -> str | None:
    """Why a sharded parameter cannot be trained, or None."""
    from torch.distributed.tensor import Replicate, Shard

    placements: Any = parameter.placements  # type: ignore[attr-defined]
    shards = [p for p in placements if not isinstance(p, Replicate)]
    # A subclass of Shard interleaves rows, for tensor parallelism under FSDP.
    if len(shards) <= 1 and all(type(p) is Shard and p.dim == 0 for p in shards):
        return None
    return (
        f"parameter {name!r} is placed as {tuple(placements)}; expected one Shard(0), as "
        "fully_shard makes it, and replicas beside it. Tensor parallelism is not supported"
    )


def holding(parameter: Tensor, ranks: Ranks) -> Holding:
    """Where a parameter's rows are, found without a message."""
    length = parameter.shape[0]
    if not is_sharded(parameter):
        everything = ((0, length),) * ranks.size
        return Holding(everything, tuple(range(ranks.size)), sharded=False)
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
    return Holding(tuple(rows), tuple(replicas), sharded=along is not None)
