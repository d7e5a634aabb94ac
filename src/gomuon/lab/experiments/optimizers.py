"""Optimizers by name: the recipes and a few variants, how each is built, its rate in a race."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import gomuon
from gomuon.lab.errors import LabError, unknown_name
from gomuon.lab.experiments.models import Attention
from gomuon.layers import LayerSpec
from gomuon.optimizer import MatrixOptimizer
from gomuon.recipes import RECIPES, Recipe
from gomuon.telemetry import Alignment

ADAMW = "adamw"
ADAMW_BETAS = (0.9, 0.95)
ADAMW_RATE = 3e-3
# The paper's polar factor, which completes the null space: every campaign under results/ used it.
POLAR = "svd"

# Peak matrix rates of tasks that want others than the recipes' own.
RATES: dict[str, dict[str, float]] = {"grokking": {"muon": 0.16, ADAMW: 1e-2}}


@dataclass(frozen=True)
class OptimizerEntry:
    """A name on the command line.

    Attributes:
        recipe: the class of gomuon behind it.
        title: what tables and pictures call it.
        options: settings that set a variant apart from its recipe.
        per_head: {pattern of parameters: the side, "rows" or "columns", its heads lie along}.
        base: the name whose rates it starts from; "" for a recipe itself.
    """

    recipe: Recipe
    title: str
    options: Mapping[str, Any] = field(default_factory=dict)
    per_head: Mapping[str, str] = field(default_factory=dict)
    base: str = ""


def command_name(name: str) -> str:
    """The command line's spelling of a class: KFACMuon is kfac-muon, MuonQK is muon-qk."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", name).lower()


TITLES = {"GoMuon": "Go-MUON"}
VARIANTS: dict[str, OptimizerEntry] = {
    "go-muon-input": OptimizerEntry(
        RECIPES["GoMuon"], "Go-MUON input only", options={"alpha": (0.0, 0.25)}, base="go-muon"
    ),
    "go-muon-output": OptimizerEntry(
        RECIPES["GoMuon"], "Go-MUON output only", options={"alpha": (0.25, 0.0)}, base="go-muon"
    ),
    "muon-heads": OptimizerEntry(
        RECIPES["Muon"],
        "Muon per head",
        per_head={"*.attention.[qkv].weight": "rows", "*.attention.o.weight": "columns"},
        base="muon",
    ),
}
ENTRIES: dict[str, OptimizerEntry] = {
    **{
        command_name(name): OptimizerEntry(recipe, TITLES.get(name, name))
        for name, recipe in RECIPES.items()
    },
    **VARIANTS,
}


def names() -> list[str]:
    """Every name that can be raced."""
    return [ADAMW, *ENTRIES]


def find(name: str) -> OptimizerEntry | None:
    """What stands behind a name; None for torch's AdamW.

    Raises:
        LabError: the name is unknown; the nearest is suggested.
    """
    if name == ADAMW:
        return None
    if name not in ENTRIES:
        raise unknown_name("optimizer", name, names())
    return ENTRIES[name]


def title(name: str) -> str:
    """What tables and pictures call it."""
    entry = find(name)
    return "AdamW" if entry is None else entry.title


def has_momentum(name: str) -> bool:
    entry = find(name)
    return entry is not None and "momentum" in entry.recipe.defaults


def refresh_interval(name: str, options: Mapping[str, Any]) -> int:
    """Steps from one renewal of its geometry to the next; 1 for what has none."""
    entry = find(name)
    settings = {} if entry is None else {**entry.recipe.defaults, **entry.options}
    return int({**settings, **options}.get("refresh_every", 1))


def default_rate(name: str, task: str) -> float:
    """The peak matrix rate of a race in which none was given."""
    entry = find(name)
    rates = RATES.get(task, {})
    if entry is None:
        return rates.get(ADAMW, ADAMW_RATE)
    rate: float = rates.get(entry.base or name, entry.recipe.defaults["lr"])
    return rate


def build(
    name: str, model: nn.Module, lr: float, adamw_lr: float, options: dict[str, Any]
) -> torch.optim.Optimizer:
    """The optimizer of a run.

    Args:
        name: one of ``names()``.
        model: its matrices take ``lr``; embeddings, norms and vectors are AdamW's at ``adamw_lr``.
        lr: peak rate of the matrices; with "adamw", of the whole model.
        adamw_lr: peak rate of everything else.
        options: further keywords of the optimizer, such as ``refresh_every``.
    """
    entry = find(name)
    try:
        if entry is None:
            return torch.optim.AdamW(
                model.parameters(), lr=lr, **{"betas": ADAMW_BETAS, "weight_decay": 0.0, **options}
            )
        kind: type[MatrixOptimizer] = getattr(gomuon, entry.recipe.name)
        named = {"polar": POLAR} if "polar" in entry.recipe.defaults else {}
        settings = {**named, **entry.options, **options}
        if entry.per_head:
            settings["specs"] = head_specs(entry.per_head, model)
        adamw = {"lr": adamw_lr, "betas": ADAMW_BETAS, "weight_decay": 0.0}
        return kind(model, lr=lr, adamw=adamw, **settings)
    except (TypeError, ValueError) as error:
        raise LabError(f"optimizer {name!r} refuses its settings: {error}") from error


def head_specs(per_head: Mapping[str, str], model: nn.Module) -> dict[str, LayerSpec]:
    """The cuts along heads, for as many heads as the model's attention has."""
    heads = next((part.heads for part in model.modules() if isinstance(part, Attention)), None)
    if heads is None:
        raise ValueError("the model has no attention whose heads could be told apart")
    cuts = {"rows": LayerSpec(heads=heads), "columns": LayerSpec(input_heads=heads)}
    return {pattern: cuts[side] for pattern, side in per_head.items()}


def watch_alignment(optimizer: torch.optim.Optimizer) -> Alignment | None:
    """Counts updates of a gomuon optimizer against their source or gradient; None for AdamW."""
    return Alignment(optimizer) if isinstance(optimizer, MatrixOptimizer) else None
