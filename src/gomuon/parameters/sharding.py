"""Sharded parameters and this rank's part of them. Does not import torch.distributed."""

import sys
from typing import Any

from torch import Tensor


def is_sharded(parameter: Tensor) -> bool:
    # A sharded tensor exists only if its module was imported. Importing it is as slow as torch.
    placements = sys.modules.get("torch.distributed.tensor")
    return placements is not None and isinstance(parameter, placements.DTensor)


def is_fully_sharded(module: object) -> bool:
    """Whether fully_shard was called on a module. Checked by name: importing FSDP is slow."""
    return any(base.__name__ == "FSDPModule" for base in type(module).__mro__)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor; not a copy."""
    here: Tensor = tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return here


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole tensor. If it is sharded, its ranks exchange messages."""
    gathered: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return gathered


def local_gradient(parameter: Tensor) -> Tensor | None:
    return None if parameter.grad is None else local(parameter.grad)


def why_not_supported(name: str, parameter: Tensor) -> str | None:
    """Why a parameter that `fully_shard` alone has sharded cannot be trained; None if it can."""
    from torch.distributed.tensor import Replicate, Shard

    placements: Any = parameter.placements  # type: ignore[attr-defined]
    shards = [p for p in placements if not isinstance(p, Replicate)]
    # A subclass of Shard interleaves rows, for tensor parallelism under FSDP.
    if len(shards) <= 1 and all(type(p) is Shard and p.dim == 0 for p in shards):
        return None
    return (
        f"parameter {name!r} has the placements {tuple(placements)}; expected one Shard(0), as "
        "made by fully_shard, and otherwise replicas. For tensor parallelism pass the model, not "
        "its parameters"
    )
