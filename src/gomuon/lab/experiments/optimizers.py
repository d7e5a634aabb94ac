"""Optimizers by command-line name: how each is built, and its default rate."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from gomuon.intervals import from_plain, longest
from gomuon.lab.errors import LabError, unknown_name
from gomuon.lab.experiments import own_code, own_optimizers
from gomuon.lab.experiments.foreign import AnyOptimizer
from gomuon.lab.experiments.gauss_newton import GaussNewton
from gomuon.lab.experiments.interpolated import InterpolatedGoMuon
from gomuon.lab.experiments.models import Attention
from gomuon.lab.experiments.own_optimizers import OwnOptimizer
from gomuon.optimizer import MatrixOptimizer
from gomuon.parameters.specs import LayerSpec
from gomuon.recipes.recipe import Recipe
from gomuon.recipes.registry import METHODS
from gomuon.telemetry import Alignment, Refreshes

ADAMW = "adamw"
GAUSS_NEWTON = "gauss-newton"
ADAMW_BETAS = (0.9, 0.95)
ADAMW_RATE = 3e-3
# Optimizers that are no recipe of ours: their titles, and their default rates.
OTHERS: dict[str, tuple[str, float]] = {
    ADAMW: ("AdamW", ADAMW_RATE),
    GAUSS_NEWTON: ("Gauss–Newton", 0.1),
}
# The paper's arithmetic, whatever a method's defaults are; arms that differ from it say so. The
# polar factor completes the null space, and all rows enter the statistics.
ARITHMETIC: dict[str, Any] = {"polar": "svd", "rows": None}

# Peak matrix rates of tasks for which the recipe's default is not suitable.
# The sweeps on the texts were declared around Shampoo's published rate.
RATES: dict[str, dict[str, float]] = {
    "grokking": {"muon": 0.16, ADAMW: 1e-2},
    "ptb": {"shampoo": 1e-2},
    "shakespeare": {"shampoo": 1e-2},
    # Picked on seed 100 by the sweeps that docs/tasks.md names.
    "digits-vit": {"go-muon": 0.02, "muon": 0.01, ADAMW: 6e-3},
    "digits-conv": {"go-muon": 0.32, "muon": 0.08, ADAMW: 1.2e-2},
    "digits-lora": {"go-muon": 0.04, "muon": 0.04, ADAMW: 1.2e-2},
    # The solution is large, so that a step of the usual length would not reach it.
    "regression": {
        "go-muon": 2.0,
        "muon": 4.0,
        ADAMW: 1.2,
        "kfac": 0.12,
        "soap": 0.2,
        "shampoo": 1e-2,
        "kfac-muon": 0.6,
    },
}


@dataclass(frozen=True)
class OptimizerEntry:
    """An optimizer with a name on the command line.

    Attributes:
        method: the name of the class in the registry.
        title: used in tables and plots.
        options: settings in which a variant differs from its recipe.
        per_head: {pattern of parameters: "rows" or "columns", the side that is split into heads}.
        base: the name whose default rate a variant uses; "" for a recipe itself.
        kind: a class that is not in the registry.
    """

    method: str
    title: str
    options: Mapping[str, Any] = field(default_factory=dict)
    per_head: Mapping[str, str] = field(default_factory=dict)
    base: str = ""
    kind: type[MatrixOptimizer] | None = None

    @property
    def optimizer(self) -> type[MatrixOptimizer]:
        return METHODS[self.method] if self.kind is None else self.kind

    @property
    def recipe(self) -> Recipe:
        return self.optimizer.recipe


def command_name(name: str) -> str:
    """The command-line name of a class: kfac-muon for KFACMuon, muon-qk for MuonQK."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", name).lower()


TITLES = {"GoMuon": "Go-MUON"}
VARIANTS: dict[str, OptimizerEntry] = {
    "go-muon-input": OptimizerEntry(
        "GoMuon",
        "Go-MUON input only",
        options={"alpha": (0.0, 0.25)},
        base="go-muon",
    ),
    "go-muon-output": OptimizerEntry(
        "GoMuon",
        "Go-MUON output only",
        options={"alpha": (0.25, 0.0)},
        base="go-muon",
    ),
    "muon-heads": OptimizerEntry(
        "Muon",
        "Muon per head",
        per_head={"*.attention.[qkv].weight": "rows", "*.attention.o.weight": "columns"},
        base="muon",
    ),
}
# Of single experiments; no list of methods shows them.
CONTROLS: dict[str, OptimizerEntry] = {
    "go-muon-interpolated": OptimizerEntry(
        "GoMuon",
        "Go-MUON with interpolated maps",
        base="go-muon",
        kind=InterpolatedGoMuon,
    ),
}


def entries() -> dict[str, OptimizerEntry]:
    """All methods of the registry, a user's own included, and the variants, by name."""
    methods = {command_name(name): OptimizerEntry(name, TITLES.get(name, name)) for name in METHODS}
    return {**methods, **VARIANTS}


def names() -> list[str]:
    """All names that `gomuon race` accepts."""
    return [*OTHERS, *entries()]


def find(name: str) -> OptimizerEntry | None:
    """The optimizer of a name; None for torch's AdamW and the others that are no recipe.

    Raises:
        LabError: the name is unknown; the message suggests the nearest one. Or it means a class
            from outside that is not of our kind.
    """
    if name in OTHERS:
        return None
    if own_code.is_own(name):
        kind = own_optimizers.find(name).kind
        if not issubclass(kind, MatrixOptimizer):
            raise LabError(
                f"{name} comes from outside, so its recipe is unknown; only race and tune take it"
            )
        return OptimizerEntry(kind.__name__, own_code.title(name), kind=kind)
    known = {**entries(), **CONTROLS}
    if name not in known:
        raise unknown_name("optimizer", name, names())
    return known[name]


def foreign(name: str) -> OwnOptimizer | None:
    """A class from outside that is not of our kind; None for all others."""
    if not own_code.is_own(name):
        return None
    found = own_optimizers.find(name)
    return None if issubclass(found.kind, MatrixOptimizer) else found


def check_name(name: str) -> str:
    """The name of an optimizer that can be built; a LabError for others."""
    if foreign(name) is None:
        find(name)
    return name


def title(name: str) -> str:
    """The title of an optimizer in tables and plots; imports nothing."""
    if own_code.is_own(name):
        return own_code.title(name)
    entry = find(name)
    return OTHERS[name][0] if entry is None else entry.title


def has_momentum(name: str) -> bool:
    other = foreign(name)
    if other is not None:
        return other.has_momentum
    entry = find(name)
    return entry is not None and "momentum" in entry.recipe.defaults


def refresh_interval(name: str, options: Mapping[str, Any]) -> int:
    """Steps within which the geometry is renewed; 1 for an optimizer without one."""
    other = foreign(name)
    if other is not None:
        return other.interval(options)
    entry = find(name)
    settings = {} if entry is None else {**entry.recipe.defaults, **entry.options}
    return longest(from_plain({**settings, **options}.get("refresh_every")))


def default_rate(name: str, task: str) -> float:
    """The peak matrix rate if none is given.

    Raises:
        LabError: a class from outside has none.
    """
    if foreign(name) is not None:
        return own_optimizers.require_rate(name)
    entry = find(name)
    rates = RATES.get(task, {})
    if entry is None:
        return rates.get(name, OTHERS[name][1])
    rate: float = rates.get(entry.base or name, entry.recipe.defaults["lr"])
    return rate


def build(
    name: str, model: nn.Module, lr: float, adamw_lr: float, options: dict[str, Any]
) -> AnyOptimizer:
    """The optimizer of a run.

    Args:
        name: one of ``names()``, or a class from outside.
        model: its matrices get ``lr``; AdamW updates all other parameters with ``adamw_lr``.
        lr: peak rate of the matrices; with "adamw" and "gauss-newton", of the whole model.
        adamw_lr: peak rate of everything else.
        options: further keywords of the optimizer, such as ``refresh_every``.
    """
    if foreign(name) is not None:
        return own_optimizers.build(name, model, lr, adamw_lr, options)
    entry = find(name)
    try:
        if name == GAUSS_NEWTON:
            return GaussNewton(model, lr, **options)
        if entry is None:
            return _adamw(model, lr, {"betas": ADAMW_BETAS, "weight_decay": 0.0, **options})
        known = entry.recipe.defaults
        named = {key: value for key, value in ARITHMETIC.items() if key in known}
        given = {**named, **entry.options, **options}
        settings = {key: from_plain(value) for key, value in given.items()}
        if entry.per_head:
            settings["specs"] = head_specs(entry.per_head, model)
        betas = ADAMW_BETAS if "betas" in known else settings.pop("betas", ADAMW_BETAS)
        adamw: dict[str, Any] = {"lr": adamw_lr, "betas": betas, "weight_decay": 0.0}
        if settings.get("lr_scale") == "adamw":  # one rate and one decay for all parameters
            adamw = {"betas": betas}
        return entry.optimizer(model, lr=lr, adamw=adamw, **settings)
    except (TypeError, ValueError) as error:
        raise LabError(f"invalid settings of optimizer {name!r}: {error}") from error


def _adamw(model: nn.Module, lr: float, options: dict[str, Any]) -> torch.optim.AdamW:
    """Torch's AdamW. As is usual, norms and biases do not decay."""
    decay = options.pop("weight_decay")
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    if not decay or not others:
        return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=decay, **options)
    groups = [
        {"params": matrices, "weight_decay": decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, **options)


def head_specs(per_head: Mapping[str, str], model: nn.Module) -> dict[str, LayerSpec]:
    """Specs that split matrices into the heads of the model's attention."""
    heads = next((part.heads for part in model.modules() if isinstance(part, Attention)), None)
    if heads is None:
        raise ValueError("the model has no Attention module, so its number of heads is unknown")
    cuts = {"rows": LayerSpec(heads=heads), "columns": LayerSpec(input_heads=heads)}
    return {pattern: cuts[side] for pattern, side in per_head.items()}


COUNTED = ("negative_source", "negative_gradient", "refreshes")


class Counts:
    """What runs with telemetry count."""

    def __init__(self, optimizer: MatrixOptimizer) -> None:
        self._alignment = Alignment(optimizer)
        self._refreshes = Refreshes(optimizer)

    def now(self) -> dict[str, int]:
        """The counts in this process, by name."""
        found = self._alignment.negative_source, self._alignment.negative_gradient
        return dict(zip(COUNTED, (*found, self._refreshes.count), strict=True))


def watched(optimizer: AnyOptimizer) -> Counts | None:
    """Counts what a gomuon optimizer does; None for others."""
    return Counts(optimizer) if isinstance(optimizer, MatrixOptimizer) else None
