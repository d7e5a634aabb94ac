"""Optimizers by name: how each is built for a model, and the rate it starts from in a race."""

from __future__ import annotations

import importlib
from typing import Any, Protocol

import torch
from torch import nn

import gomuon
from gomuon.lab.errors import LabError, unknown_name

ADAMW = "adamw"

# Names on the command line and the class of gomuon behind each, looked up when it is used.
CLASSES = {
    "go-muon": "GoMuon",
    "muon": "Muon",
    "muon-qk": "MuonQK",
    "halfspace": "Halfspace",
    "kfac": "KFAC",
    "kfac-muon": "KFACMuon",
    "shampoo": "Shampoo",
    "soap": "SOAP",
    "mousse": "Mousse",
    "fismo": "FISMO",
    "newton-muon": "NewtonMuon",
    "muon-plus": "MuonPlus",
    "muon-eq": "MuonEq",
    "muon-squared": "MuonSquared",
    "malt": "MALT",
    "scion": "Scion",
}

# Peak matrix rates the paper and its reproduction settled on; others start from their defaults.
RATES: dict[str, dict[str, float]] = {
    "ptb": {"go-muon": 0.08, "muon": 0.02, "muon-qk": 0.018, "halfspace": 0.08, ADAMW: 3e-3},
    "shakespeare": {
        "go-muon": 0.08,
        "muon": 0.02,
        "muon-qk": 0.018,
        "halfspace": 0.08,
        ADAMW: 3e-3,
    },
    "grokking": {"go-muon": 0.08, "muon": 0.16, ADAMW: 1e-2},
}

ADAMW_BETAS = (0.9, 0.95)


def names() -> list[str]:
    """Every name this version of gomuon can build."""
    return [ADAMW, *(name for name, attribute in CLASSES.items() if hasattr(gomuon, attribute))]


def resolve(name: str) -> type[torch.optim.Optimizer]:
    """The class behind a name.

    Raises:
        LabError: the name is unknown, or known but not part of this version of gomuon.
    """
    if name == ADAMW:
        return torch.optim.AdamW
    if name not in CLASSES:
        raise unknown_name("optimizer", name, [ADAMW, *CLASSES])
    found = getattr(gomuon, CLASSES[name], None)
    if found is None:
        raise LabError(
            f"optimizer {name!r} needs gomuon.{CLASSES[name]}, which gomuon "
            f"{gomuon.__version__} does not have; it has {', '.join(names())}"
        )
    kind: type[torch.optim.Optimizer] = found
    return kind


def default_rate(name: str, task: str) -> float:
    """The peak matrix rate of a race in which none was given."""
    kind = resolve(name)
    if name in RATES.get(task, {}):
        return RATES[task][name]
    recipe = getattr(kind, "recipe", None)
    rate = None if recipe is None else recipe.defaults.get("lr")
    if not isinstance(rate, float):
        raise LabError(f"optimizer {name!r} has no default rate; give one with --lr {name}=…")
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
    kind: Any = resolve(name)
    try:
        if name == ADAMW:
            return torch.optim.AdamW(
                model.parameters(), lr=lr, **{"betas": ADAMW_BETAS, "weight_decay": 0.0, **options}
            )
        adamw = {"lr": adamw_lr, "betas": ADAMW_BETAS, "weight_decay": 0.0}
        optimizer: torch.optim.Optimizer = kind(model, lr=lr, adamw=adamw, **options)
    except (TypeError, ValueError) as error:
        raise LabError(f"optimizer {name!r} refuses its settings: {error}") from error
    return optimizer


class Alignment(Protocol):
    """Counts of steps that opposed their momentum source or their gradient."""

    negative_source: int
    negative_gradient: int


def watch_alignment(optimizer: torch.optim.Optimizer) -> Alignment | None:
    """The running counts of an optimizer of gomuon; None where nothing is counted."""
    try:
        telemetry = importlib.import_module("gomuon.telemetry")
    except ModuleNotFoundError:
        return None
    if type(optimizer).__module__.split(".")[0] != "gomuon" or not hasattr(telemetry, "Alignment"):
        return None
    counts: Alignment = telemetry.Alignment(optimizer)
    return counts
