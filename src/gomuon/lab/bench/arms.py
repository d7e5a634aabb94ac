"""What an optimizer in the benchmark is, and how it is given its part of a model.

All use one learning rate, because the time of a step does not depend on it. Every method gets the
matrices that gomuon's routing selects; AdamW takes the other parameters within the same timed step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gomuon.lab.experiments import foreign
from gomuon.parameters.routing import route
from gomuon.recipes.registry import METHODS

RATE = 1e-3
REFERENCE = "adamw"  # its model has no hooks: its forward and backward time is the unit


class Stepper(Protocol):
    def step(self) -> Any: ...
    def zero_grad(self) -> Any: ...


class CannotTrain(Exception):
    """An arm cannot train this model, or its package is not installed; the message says why."""


@dataclass(frozen=True)
class BenchArm:
    """An optimizer in the benchmark.

    Attributes:
        name: on the command line.
        title: in tables.
        package: where the optimizer comes from.
        build: creates it for a model; may raise `CannotTrain`.
        interval: steps between two refreshes of its geometry; None for ours, whose settings say so.
        note: what a reader should know about it.
    """

    name: str
    title: str
    package: str
    build: Callable[[nn.Module], Stepper]
    interval: int | None = 1
    note: str = ""


def adamw(parameters: Sequence[Tensor]) -> torch.optim.AdamW:
    return foreign.adamw(parameters, RATE)


def beside_adamw(
    make: Callable[[list[Tensor]], torch.optim.Optimizer], two_dimensional: bool = False
) -> Callable[[nn.Module], Stepper]:
    """Give the matrices to the optimizer that `make` creates, everything else to AdamW."""

    def build(model: nn.Module) -> Stepper:
        matrices, rest = foreign.matrices_and_rest(model)
        if two_dimensional and any(p.ndim != 2 for p in matrices):
            raise CannotTrain("accepts parameters of two dimensions only")
        return foreign.CombinedOptimizer([make(matrices), *([adamw(rest)] if rest else [])])

    return build


def gomuon_optimizer(name: str, **options: Any) -> Callable[[nn.Module], Stepper]:
    kind = METHODS[name]

    def build(model: nn.Module) -> Stepper:
        settings = {"lr": RATE, "betas": (0.9, 0.95), "weight_decay": 0.0}
        made: Stepper = kind(model, lr=RATE, adamw=settings, **options)
        return made

    return build


def linear_only(make: Callable[[nn.Module], Stepper]) -> Callable[[nn.Module], Stepper]:
    """For plain loops, which handle `nn.Linear` only: refuse models with other matrices."""

    def build(model: nn.Module) -> Stepper:
        matrices = {id(r.parameter) for r in route(model).treated("matrix")}
        if matrices != {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}:
            raise CannotTrain("handles nn.Linear only, and this model has other matrices")
        return make(model)

    return build
