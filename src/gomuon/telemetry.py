"""Measurements while an optimizer runs."""

from collections.abc import Sequence

from torch import Tensor

from gomuon.optimizer import MatrixOptimizer
from gomuon.parameters.layers import Layer
from gomuon.parameters.stacks import Stack
from gomuon.step import Group
from gomuon.watching.negatives import negatives


class Alignment:
    """Counts updates that point against their source, ⟨M̂, U⟩ < 0, or their gradient, ⟨G, U⟩ < 0.

    For a matched direction the first is impossible by Theorem 1; the second is always possible.
    `optimizer.watch()` records this and more; this counts over a whole run and reads nothing
    before it is asked.
    """

    def __init__(self, optimizer: MatrixOptimizer) -> None:
        self._counts: Tensor | None = None
        self._remove = optimizer._observe(self)

    @property
    def negative_source(self) -> int:
        return 0 if self._counts is None else int(self._counts[0])

    @property
    def negative_gradient(self) -> int:
        return 0 if self._counts is None else int(self._counts[1])

    def remove(self) -> None:
        self._remove()

    def before_refresh(
        self, observed: Sequence[Layer], renewed: Sequence[Layer], group: Group
    ) -> None:
        """Nothing is counted before a refresh."""

    def updated(self, stack: Stack, source: Tensor, D: Tensor, U: Tensor, group: Group) -> None:
        """Count the updates of a stack; see `step.Observer`."""
        found = negatives(stack, source, U).sum(0)
        self._counts = found if self._counts is None else self._counts + found.to(self._counts)


class Refreshes:
    """Counts how often the maps of a layer were renewed, over all layers of this rank."""

    def __init__(self, optimizer: MatrixOptimizer) -> None:
        self.count = 0
        self._remove = optimizer._observe(self)

    def remove(self) -> None:
        self._remove()

    def before_refresh(
        self, observed: Sequence[Layer], renewed: Sequence[Layer], group: Group
    ) -> None:
        """Count the layers of a refresh; see `step.Observer`."""
        self.count += len(renewed)

    def updated(self, stack: Stack, source: Tensor, D: Tensor, U: Tensor, group: Group) -> None:
        """Nothing is counted when weights move."""


def root_fallbacks(optimizer: MatrixOptimizer) -> dict[str, int]:
    """How often roots by products failed, by layer; each was computed by decomposition instead.

    That is no error, but slow on accelerators. Only layers of this rank are counted.
    """
    counts = {
        row.name: optimizer.state[row.parameter].get("root_fallbacks", 0)
        for row in optimizer.routing_table().treated("matrix")
    }
    return {name: count for name, count in counts.items() if count}
