"""The optimizers that are measured: ours, torch's and two simple baselines.

All use one learning rate, because the time of a step does not depend on it. Every method gets the
matrices that gomuon's routing selects; AdamW takes the other parameters within the same timed step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

import gomuon
from gomuon.lab.bench.newton_schulz import NewtonSchulzMuon
from gomuon.lab.bench.plain_loop import plain_go_muon, plain_muon
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
        interval: steps between two refreshes of its geometry.
        build: creates it for a model; may raise `CannotTrain`.
        note: what a reader should know about it.
    """

    name: str
    title: str
    package: str
    interval: int
    build: Callable[[nn.Module], Stepper]
    note: str = ""


class CombinedOptimizer:
    """Several optimizers that step as one."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def adamw(parameters: Sequence[Tensor]) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=RATE, betas=(0.9, 0.95), weight_decay=0.0, foreach=True)


def beside_adamw(
    make: Callable[[list[Tensor]], torch.optim.Optimizer], two_dimensional: bool = False
) -> Callable[[nn.Module], Stepper]:
    """Give the matrices to the optimizer that `make` creates, everything else to AdamW."""

    def build(model: nn.Module) -> Stepper:
        table = route(model)
        matrices = [r.parameter for r in table.treated("matrix")]
        if two_dimensional and any(p.ndim != 2 for p in matrices):
            raise CannotTrain("accepts parameters of two dimensions only")
        rest = [r.parameter for r in table.treated("adamw")]
        return CombinedOptimizer([make(matrices), *([adamw(rest)] if rest else [])])

    return build


def gomuon_optimizer(name: str, **options: Any) -> Callable[[nn.Module], Stepper]:
    kind = getattr(gomuon, name)

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


def recipe_arm(name: str, title: str, arm: str = "", **options: Any) -> BenchArm:
    settings = {**METHODS[name].recipe.defaults, **options}
    clocks = [settings.get(key, 1) for key in ("statistics_every", "refresh_every")]
    return BenchArm(
        arm or name.lower(), title, "gomuon", math.lcm(*clocks), gomuon_optimizer(name, **options)
    )


def go_muon(K: int) -> BenchArm:
    return recipe_arm("GoMuon", f"Go-MUON, K = {K}", f"go-muon-{K}", refresh_every=K)


def plain_go_muon_arm(K: int) -> BenchArm:
    def build(model: nn.Module) -> Stepper:
        return plain_go_muon(model, RATE, refresh_every=K)

    title = f"plain script, Go-MUON, K = {K}"
    return BenchArm(f"plain-go-muon-{K}", title, "yardstick", K, linear_only(build))


OWN = (
    BenchArm(
        REFERENCE,
        "torch AdamW",
        "torch",
        1,
        lambda model: adamw(list(model.parameters())),
        "foreach=True; its forward and backward passes are the unit of every time",
    ),
    recipe_arm("Muon", "Muon"),
    go_muon(1),
    go_muon(4),
    go_muon(16),
    recipe_arm("SOAP", "SOAP"),
    recipe_arm("Shampoo", "Shampoo"),
    recipe_arm("KFAC", "K-FAC"),
    recipe_arm("Mousse", "Mousse"),
    BenchArm(
        "torch-muon",
        "torch Muon",
        "torch",
        1,
        beside_adamw(lambda matrices: torch.optim.Muon(matrices, lr=RATE), two_dimensional=True),
        "multiplies in bfloat16, which is slow on processors without bfloat16 units",
    ),
    BenchArm(
        "newton-schulz",
        "five Newton–Schulz steps",
        "yardstick",
        1,
        beside_adamw(lambda matrices: NewtonSchulzMuon(matrices, lr=RATE)),
        "float32, equal shapes in one batch; an approximate polar factor; ours is exact",
    ),
    plain_go_muon_arm(1),
    plain_go_muon_arm(4),
    BenchArm(
        "plain-muon",
        "plain script, Muon",
        "yardstick",
        1,
        linear_only(lambda model: plain_muon(model, RATE)),
    ),
)
