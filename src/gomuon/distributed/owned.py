"""A matrix with an owner, and its layer on the owner.

The owner receives whole gradients and sends whole steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gomuon.distributed.shards import RowRanges
from gomuon.parameters.layers import Layer
from gomuon.parameters.sharding import is_sharded


@dataclass(eq=False)
class OwnedMatrix:
    """A matrix parameter and the bias that joins it. Every rank has this object."""

    name: str
    tensors: tuple[Tensor, ...]
    state: dict[str, Any]  # on this rank
    owner: int
    row_ranges: tuple[RowRanges, ...]
    layer: "OwnedLayer | None" = None  # on its owner only

    @property
    def parameter(self) -> Tensor:
        return self.tensors[0]


@dataclass(eq=False)
class OwnedLayer(Layer):
    """A layer on its owner. Its steps are sent to all ranks before weights move."""

    whole_gradients: Sequence[Tensor] = ()
    whole_weights: Sequence[Tensor] = ()
    factor: float | Tensor = 1.0
    steps: Sequence[Tensor] = ()

    @property
    def weights(self) -> Tensor:
        return self._joined(self.whole_weights or [*map(self._here, (self.parameter, *self._bias))])

    @property
    def has_weights(self) -> bool:
        return bool(self.whole_weights) or not is_sharded(self.parameter)

    @property
    def whole_weight(self) -> Tensor:
        if not self.whole_weights and is_sharded(self.parameter):  # when state is allocated
            dtype, device = self.parameter.dtype, self.parameter.device
            return torch.zeros(self.own_shape, dtype=dtype, device=device)
        return self.whole_weights[0] if self.whole_weights else self.tensor

    @property
    def gradients(self) -> Tensor:
        if not self.whole_gradients:  # when state is allocated
            return torch.zeros_like(self.memory_or_zeros(""))
        return self._joined(self.whole_gradients)

    def move(self, factor: float | Tensor, step: Tensor) -> None:
        """Save the step. The weights move when every rank has received its rows of the step."""
        self.factor, self.steps = factor, self.joined_again(step)

    def message(self, index: int, ranges: RowRanges, rank: int) -> list[Tensor]:
        """The factor on the old weights, and a rank's part of the step of weight (0) or bias (1).

        `ranges` are those of this tensor.
        """
        tensor = (self.parameter, *self._bias)[index]
        if not self.steps:  # only observed, not moved
            step = torch.zeros(ranges.shape(rank), dtype=self.dtype, device=tensor.device)
        else:
            step = ranges.part(self.steps[index], rank)
        return [torch.as_tensor(self.factor, dtype=torch.float64, device=step.device), step]

    def forget(self) -> None:
        """Drop the gradients, weights and steps of one step."""
        self.whole_gradients = self.whole_weights = self.steps = ()
        self.factor = 1.0

    @property
    def is_direct(self) -> bool:
        return False

    @property
    def _bias(self) -> list[Tensor]:
        return [] if self.spec.bias is None else [self.spec.bias]

    def _joined(self, tensors: Sequence[Tensor]) -> Tensor:
        return self._matrices(tensors[0], tensors[1] if len(tensors) > 1 else None)


@dataclass(eq=False)
class OwnLayer(Layer):
    """A layer that only this rank has. It moves when those of all ranks do."""

    factor: float | Tensor = 1.0
    pending: Tensor | None = None

    def move(self, factor: float | Tensor, step: Tensor) -> None:
        """Save the step until no rank can fail any more."""
        self.factor, self.pending = factor, step

    def apply(self) -> None:
        """Move the weights by the step that was saved."""
        if self.pending is not None:
            super().move(self.factor, self.pending)
        self.forget()

    def forget(self) -> None:
        """Drop the step."""
        self.factor, self.pending = 1.0, None

    @property
    def is_direct(self) -> bool:
        return False
