"""Sharded parameters: what this rank holds of them. Does not import torch.distributed."""

import sys
from typing import Any

from torch import Tensor


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
