"""Measurements while an optimizer runs."""

import torch
from torch import Tensor

from gomuon.optimizer import MatrixOptimizer
from gomuon.parameters.stacks import Stack


class Alignment:
    """Counts updates that point against their source, ⟨M̂, U⟩ < 0, or their gradient, ⟨G, U⟩ < 0.

    For a matched direction the first is impossible by Theorem 1; the second is always possible.
    """

    def __init__(self, optimizer: MatrixOptimizer) -> None:
        self._counts: Tensor | None = None
        self._remove = optimizer.add_observer(self._observe)

    @property
    def negative_source(self) -> int:
        return 0 if self._counts is None else int(self._counts[0])

    @property
    def negative_gradient(self) -> int:
        return 0 if self._counts is None else int(self._counts[1])

    def remove(self) -> None:
        self._remove()

    def _observe(self, stack: Stack, source: Tensor, U: Tensor) -> None:
        negative = torch.stack([((X * U).sum(dim=(-2, -1)) < 0).sum() for X in (source, stack.G)])
        self._counts = (
            negative if self._counts is None else self._counts + negative.to(self._counts)
        )


class Refreshes:
    """Counts how often the maps of a layer were renewed, over all layers of this rank."""

    def __init__(self, optimizer: MatrixOptimizer) -> None:
        self.count = 0
        self._optimizer = optimizer
        self._remove = optimizer.add_observer(self._observe)

    def remove(self) -> None:
        self._remove()

    def _observe(self, stack: Stack, source: Tensor, U: Tensor) -> None:
        groups = self._optimizer.param_groups
        of_layers = {id(p): group for group in groups for p in group["params"]}
        clock = self._optimizer.recipe.clock
        self.count += sum(
            clock.renews(of_layers[id(layer.parameter)], layer.turn) for layer in stack.layers
        )


def root_fallbacks(optimizer: MatrixOptimizer) -> dict[str, int]:
    """How often roots by products failed, by layer; each was computed by decomposition instead.

    That is no error, but slow on accelerators. Only layers of this rank are counted.
    """
    counts = {
        row.name: optimizer.state[row.parameter].get("root_fallbacks", 0)
        for row in optimizer.routing_table().treated("matrix")
    }
    return {name: count for name, count in counts.items() if count}
