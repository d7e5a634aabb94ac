"""Which layers are stacked together, and which layers and parameters a step updates."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from gomuon.parameters.layers import Layer
from gomuon.parameters.stacks import Stack

Item = TypeVar("Item")


@dataclass
class Participants:
    """The layers and parameters of a group that a step updates; valid while `key` is the same.

    Attributes:
        key: identifies the parameters with gradients, and their states.
        stacks: the layers that this rank computes.
        others: the parameters that AdamW updates, with their states.
        matrices: the matrices of all ranks, if matrices have owners.
    """

    key: list[Any]
    stacks: list[Stack]
    others: list[tuple[Tensor, dict[str, Any]]]
    matrices: Sequence[Any] = ()

    @property
    def layers(self) -> list[Layer]:
        """The layers of all stacks."""
        return [layer for stack in self.stacks for layer in stack.layers]


# On the CPU a stack has at most this many elements, if it has more than one layer. From 32 MB on,
# the C library returns every freed tensor to the system, and to get it back takes longer than most
# operations on it.
_AT_ONCE = 2**22


def stacked(layers: Iterable[Layer]) -> list[Stack]:
    """Stacks of layers that can be computed together."""
    alike = group_by_key(layers, _stacking_key)
    return [Stack(batch) for same in alike for batch in _divided(same)]


def _divided(layers: Sequence[Layer]) -> Iterator[Sequence[Layer]]:
    """Layers of one shape, as many at a time as may be in a stack."""
    if layers[0].parameter.device.type != "cpu":
        yield layers
        return
    batch: list[Layer] = []
    for layer in layers:
        if batch and sum(one.parameter.numel() for one in (*batch, layer)) > _AT_ONCE:
            yield batch
            batch = []
        batch.append(layer)
    yield batch


def _stacking_key(layer: Layer) -> tuple[object, ...]:
    alike = layer.shape, layer.forms, layer.dtype, layer.parameter.device, layer.updates
    return *alike, layer.copies


def group_by_key(items: Iterable[Item], key: Callable[[Item], Hashable]) -> list[list[Item]]:
    """Lists of items with equal keys, in order of first appearance."""
    groups: dict[Hashable, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())
