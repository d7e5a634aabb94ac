"""Optimizers of other packages, beside AdamW: what races and the benchmark share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gomuon.parameters.routing import route


def matrices_and_rest(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """The matrices that gomuon's routing selects, and what AdamW gets."""
    table = route(model)
    return (
        [routed.parameter for routed in table.treated("matrix")],
        [routed.parameter for routed in table.treated("adamw")],
    )


def adamw(parameters: Sequence[Tensor], lr: float) -> torch.optim.AdamW:
    """AdamW for what a method of matrices leaves, with the same settings for every method."""
    return torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, foreach=True)


def leave_uncompiled(heavyball: Any) -> None:
    """On a CPU heavyball's compiler spends minutes on autotuning."""
    heavyball.utils.compile_mode = None


class CombinedOptimizer:
    """Several optimizers that step, save and load as one; `note` says who gets what."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], note: str = "") -> None:
        self.optimizers, self.note = optimizers, note

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of all parts; asked for anew, because loading a state replaces them."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for optimizer, part in zip(self.optimizers, state["parts"], strict=True):
            optimizer.load_state_dict(part)


AnyOptimizer = torch.optim.Optimizer | CombinedOptimizer


def parts_of(optimizer: AnyOptimizer) -> Sequence[torch.optim.Optimizer]:
    """The optimizers of torch's kind that step as this one."""
    return optimizer.optimizers if isinstance(optimizer, CombinedOptimizer) else [optimizer]
