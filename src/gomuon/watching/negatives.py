"""How many updates of each layer point against their source or their gradient."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gomuon.functional import linalg
from gomuon.parameters.stacks import Stack


def dtype_to_read(device: torch.device) -> torch.dtype:
    """The dtype of numbers that are read: accelerators are slow in float64, or do not have it."""
    return torch.float64 if linalg.decomposes_well(device) else torch.float32


def inner(X: Tensor, Y: Tensor) -> Tensor:
    """⟨X, Y⟩ of every matrix, [b]."""
    return (X * Y).sum(dim=(-2, -1))


def negatives(stack: Stack, source: Tensor, U: Tensor) -> Tensor:
    """Whether ⟨M̂, U⟩ < 0 and ⟨G, U⟩ < 0, [b, 2]."""
    return torch.stack([inner(X, U) < 0 for X in (source, stack.G)], 1)


class NegativeCounts:
    """Counts over some steps, kept on the device until they are read."""

    def __init__(self) -> None:
        self._counted: dict[Stack, tuple[int, Tensor]] = {}  # updates, and counts [b, 2]

    def add(self, stack: Stack, source: Tensor, U: Tensor) -> None:
        """Count one update of a stack."""
        found = negatives(stack, source, U)
        updates, counts = self._counted.get(stack, (0, None))
        self._counted[stack] = updates + 1, found.long() if counts is None else counts + found

    def tensors(self) -> list[Tensor]:
        """What is to be read, [b, 2] each, in the dtype of other numbers that are read."""
        return [counts.to(dtype_to_read(counts.device)) for _, counts in self._counted.values()]

    def by_layer(self, numbers: Sequence[Sequence[Sequence[float]]]) -> dict[str, tuple[int, ...]]:
        """By layer the number of updates and both counts, given what was read."""
        found: dict[str, tuple[int, ...]] = {}
        for (stack, (updates, _)), rows in zip(self._counted.items(), numbers, strict=True):
            begin = 0
            for layer in stack.layers:
                own = rows[begin : begin + layer.blocks]
                begin += layer.blocks
                sums = [int(sum(column)) for column in zip(*own, strict=True)]
                # A stack is made anew if other layers take part.
                before = found.get(layer.name, (0, 0, 0))
                found[layer.name] = tuple(
                    a + b for a, b in zip(before, (updates, *sums), strict=True)
                )
        return found

    def clear(self) -> None:
        """Begin anew."""
        self._counted.clear()
