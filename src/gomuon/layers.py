"""One matrix parameter as the step sees it."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gomuon.capture import Statistics


@dataclass(frozen=True)
class LayerSpec:
    """What is special about a parameter; see `Layer`."""

    blocks: int = 1
    partner: Tensor | None = None


@dataclass(eq=False)
class Layer:
    """A parameter, its state, and what was captured of it in this step.

    `spec.blocks` splits the output rows into equal blocks (attention heads) that are treated as
    matrices of their own; everything is then seen as a stack [blocks, m, n]. `spec.partner` is the
    weight this one is multiplied with (queries with keys), for geometries that are made of it.
    """

    name: str
    parameter: Tensor
    state: dict[str, Any]
    spec: LayerSpec = LayerSpec()
    statistics: Statistics | None = None

    @property
    def blocks(self) -> int:
        return self.spec.blocks

    @property
    def partner(self) -> Tensor | None:
        return self.spec.partner

    @property
    def dtype(self) -> torch.dtype:
        """State and arithmetic are float32 or wider, whatever the parameter's dtype."""
        return working_dtype(self.parameter)

    @property
    def shape(self) -> tuple[int, int]:
        """m, n of each matrix of the stack."""
        rows = self.parameter.shape[0]
        return rows // self.blocks, self.parameter.numel() // rows

    def matrices(self, tensor: Tensor) -> Tensor:
        """A tensor of the parameter's shape as its stack of matrices, [blocks, m, n]."""
        return tensor.to(self.dtype).reshape(self.blocks, *self.shape)

    @property
    def momentum(self) -> Tensor:
        """M, made on first use; [parameter's shape]."""
        if "momentum" not in self.state:
            self.state["momentum"] = torch.zeros_like(self.parameter, dtype=self.dtype)
        return self.state["momentum"]

    def map(self, side: str) -> Tensor | None:
        """P_B ("left_map") or P_A ("right_map"), [blocks, d, d]; None stands for the identity."""
        cached: Tensor | None = self.state.get(side)
        if cached is None:
            return None
        return cached.expand(self.blocks, *cached.shape[-2:])


def working_dtype(tensor: Tensor) -> torch.dtype:
    """float64 for float64, float32 for everything else."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
