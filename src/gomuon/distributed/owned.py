"""A matrix with an owner: whole gradients arrive there, and whole steps leave from there."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gomuon.distributed.shards import Holding
from gomuon.parameters.sharding import is_sharded
from gomuon.parameters.stacks import Layer


@dataclass(eq=False)
class Matrix:
    """A matrix parameter (and the bias that joins it), seen by all ranks."""

    name: str
    tensors: tuple[Tensor, ...]
    state: dict[str, Any]  # of this rank
    owner: int
    holdings: tuple[Holding, ...]
    layer: "OwnedLayer | None" = None  # on its owner only

    @property
    def parameter(self) -> Tensor:
        return self.tensors[0]


@dataclass(eq=False)
class OwnedLayer(Layer):
    """A layer on its owner: whole gradients come in, whole steps go out."""

    whole_gradients: Sequence[Tensor] = ()
    whole_weights: Sequence[Tensor] = ()
    factor: float | Tensor = 1.0
    steps: Sequence[Tensor] = ()

    @property
    def weights(self) -> Tensor:
        return self._joined(self.whole_weights or [self.parameter, *self._bias])

    @property
    def whole_weight(self) -> Tensor:
        if not self.whole_weights and is_sharded(self.parameter):  # state is allocated
            shape, device = self.parameter.shape, self.parameter.device
            return torch.zeros(shape, dtype=self.parameter.dtype, device=device)
        return self.whole_weights[0] if self.whole_weights else self.parameter

    @property
    def gradients(self) -> Tensor:
        if not self.whole_gradients:  # state is allocated
            return torch.zeros_like(self.recall(""))
        return self._joined(self.whole_gradients)

    def move(self, factor: float | Tensor, step: Tensor) -> None:
        """Keep the step; the weights move once every rank has its rows of it."""
        whole = self._whole(step)
        bias = [whole[:, -1]] if self.spec.bias is not None else []
        whole = whole[:, :-1] if self.spec.bias is not None else whole
        whole = whole.mT if self.spec.transposed else whole
        self.factor, self.steps = factor, [whole.reshape(self.parameter.shape), *bias]

    def message(self, index: int, rows: tuple[int, int]) -> list[Tensor]:
        """Those rows of the step of the weight (0) or the bias (1), and the factor of the old."""
        tensor = (self.parameter, *self._bias)[index]
        begin, end = rows
        if not self.steps:  # only observed, not moved
            shape = (end - begin, *tensor.shape[1:])
            step = torch.zeros(shape, dtype=self.dtype, device=tensor.device)
        else:
            step = self.steps[index][begin:end]
        return [torch.as_tensor(self.factor, dtype=torch.float64, device=step.device), step]

    def forget(self) -> None:
        """Drop what belongs to one step."""
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
