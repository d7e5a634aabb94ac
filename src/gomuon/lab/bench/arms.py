"""What trains: our methods, torch's, two yardsticks and other packages, each by name.

All run at one rate, on which the time of a step does not depend. Every method gets the matrices
gomuon's routing names, and everything else goes to AdamW within the same timed step.
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
from gomuon.recipes import RECIPES
from gomuon.routing import route

RATE = 1e-3
REFERENCE = "adamw"  # a model without hooks: its forward and backward passes are the unit


class Stepper(Protocol):
    def step(self) -> Any: ...
    def zero_grad(self) -> Any: ...


class Unfit(Exception):
    """An arm cannot train this model, or its package is not here; the message says why."""


@dataclass(frozen=True)
class Arm:
    """An optimizer in the benchmark.

    Attributes:
        name, title: on the command line, and in tables.
        package: whose it is.
        interval: steps from one renewal of its geometry to the next.
        build: makes it for a model; may raise `Unfit`.
        note: what a reader should know about it.
    """

    name: str
    title: str
    package: str
    interval: int
    build: Callable[[nn.Module], Stepper]
    note: str = ""


class Together:
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
    """The matrices to what `make` makes, everything else to AdamW."""

    def build(model: nn.Module) -> Stepper:
        table = route(model)
        matrices = [r.parameter for r in table.treated("matrix")]
        if two_dimensional and any(p.ndim != 2 for p in matrices):
            raise Unfit("takes parameters of two dimensions only")
        rest = [r.parameter for r in table.treated("adamw")]
        return Together([make(matrices), *([adamw(rest)] if rest else [])])

    return build


def ours(name: str, **options: Any) -> Callable[[nn.Module], Stepper]:
    kind = getattr(gomuon, name)

    def build(model: nn.Module) -> Stepper:
        settings = {"lr": RATE, "betas": (0.9, 0.95), "weight_decay": 0.0}
        made: Stepper = kind(model, lr=RATE, adamw=settings, **options)
        return made

    return build


def plainly(make: Callable[[nn.Module], Stepper]) -> Callable[[nn.Module], Stepper]:
    """A plain script, where it does the same job: it knows `nn.Linear` and nothing else."""

    def build(model: nn.Module) -> Stepper:
        matrices = {id(r.parameter) for r in route(model).treated("matrix")}
        if matrices != {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}:
            raise Unfit("knows nn.Linear only, and this model has other matrices")
        return make(model)

    return build


def recipe_arm(name: str, title: str, arm: str = "", **options: Any) -> Arm:
    settings = {**RECIPES[name].defaults, **options}
    clocks = [settings.get(key, 1) for key in ("statistics_every", "refresh_every")]
    return Arm(arm or name.lower(), title, "gomuon", math.lcm(*clocks), ours(name, **options))


def go_muon(K: int) -> Arm:
    return recipe_arm("GoMuon", f"Go-MUON, K = {K}", f"go-muon-{K}", refresh_every=K)


def plain_go_muon_arm(K: int) -> Arm:
    def build(model: nn.Module) -> Stepper:
        return plain_go_muon(model, RATE, refresh_every=K)

    title = f"plain script, Go-MUON, K = {K}"
    return Arm(f"plain-go-muon-{K}", title, "yardstick", K, plainly(build))


OWN = (
    Arm(
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
    Arm(
        "torch-muon",
        "torch Muon",
        "torch",
        1,
        beside_adamw(lambda matrices: torch.optim.Muon(matrices, lr=RATE), two_dimensional=True),
        "multiplies in bfloat16, which is slow on processors without bfloat16 units",
    ),
    Arm(
        "newton-schulz",
        "five Newton–Schulz steps",
        "yardstick",
        1,
        beside_adamw(lambda matrices: NewtonSchulzMuon(matrices, lr=RATE)),
        "float32, equal shapes in one batch; an approximate polar factor, where ours is exact",
    ),
    plain_go_muon_arm(1),
    plain_go_muon_arm(4),
    Arm(
        "plain-muon",
        "plain script, Muon",
        "yardstick",
        1,
        plainly(lambda model: plain_muon(model, RATE)),
    ),
)
