"""Equal shapes stacked, so that one call serves many layers."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from gomuon.layers import Layer

Item = TypeVar("Item")


def alike(items: Iterable[Item], key: Callable[[Item], Hashable]) -> list[list[Item]]:
    """Items with equal keys together, in order of first appearance."""
    groups: dict[Hashable, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def stack(batch: Sequence[Layer], what: Callable[[Layer], Tensor | None]) -> Tensor:
    """One tensor per layer as matrices, [Σ blocks, m, n]."""
    parts = [layer.matrices(part) for layer in batch if (part := what(layer)) is not None]
    return torch.cat(parts)


def unstack(stacked: Tensor, batch: Sequence[Layer], where: Callable[[Layer], Tensor]) -> None:
    parts = stacked.split([layer.blocks for layer in batch])
    for layer, part in zip(batch, parts, strict=True):
        where(layer).copy_(part.reshape(layer.parameter.shape))


def stacked_maps(batch: Sequence[Layer], side: str) -> Tensor | None:
    """P_B or P_A of each layer, stacked; None when all are the identity."""
    maps = [layer.map(f"{side}_map") for layer in batch]
    present = next((cached for cached in maps if cached is not None), None)
    if present is None:
        return None
    identity = torch.eye(present.shape[-1], dtype=present.dtype, device=present.device)
    return torch.cat(
        [
            identity.expand(layer.blocks, -1, -1) if cached is None else cached
            for layer, cached in zip(batch, maps, strict=True)
        ]
    )
