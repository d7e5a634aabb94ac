"""The optimizers that are measured and come with us: our methods, torch's, and simple baselines.

Every method with a polar factor is measured with its default, and with products alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from gomuon.lab.bench.arms import (
    RATE,
    REFERENCE,
    BenchArm,
    Stepper,
    adamw,
    beside_adamw,
    gomuon_optimizer,
    linear_only,
)
from gomuon.lab.bench.newton_schulz import NewtonSchulzMuon
from gomuon.lab.bench.plain_loop import plain_go_muon, plain_muon
from gomuon.lab.experiments.optimizers import command_name
from gomuon.recipes.registry import METHODS

TITLES = {
    "GoMuon": "Go-MUON",
    "KFAC": "K-FAC",
    "KFACMuon": "K-FAC Muon",
    "MatchedKFAC": "Matched K-FAC",
}
# Settings that only some of the methods have are left out for the others.
FAST = {"polar": "fast", "roots": "auto"}
EXACT = {"polar": "exact"}
PRESET = {"preset": "fast"}


def method_arm(method: str, name: str = "", words: str = "", **options: Any) -> BenchArm:
    """A method of ours; `words` say in which settings it differs from its defaults."""
    title = TITLES.get(method, method)
    return BenchArm(
        name or command_name(method),
        f"{title}, {words}" if words else title,
        "gomuon",
        gomuon_optimizer(method, **options),
        interval=None,
    )


def fast(method: str, name: str = "", words: str = "", **options: Any) -> BenchArm:
    """The same with products alone."""
    known = METHODS[method].recipe.settings
    settings = {key: value for key, value in FAST.items() if key in known}
    name = f"{name or command_name(method)}-fast"
    words = f"{words}, fast polar" if words else "fast polar"
    return method_arm(method, name, words, **settings, **options)


def both_tiers(*methods: str) -> Iterator[BenchArm]:
    for method in methods:
        yield method_arm(method)
        if "polar" in METHODS[method].recipe.settings:
            yield fast(method)


def go_muon(K: int) -> BenchArm:
    return method_arm("GoMuon", f"go-muon-{K}", f"K = {K}", refresh_every=K)


def plain_go_muon_arm(K: int) -> BenchArm:
    def build(model: nn.Module) -> Stepper:
        return plain_go_muon(model, RATE, refresh_every=K)

    title = f"plain script, Go-MUON, K = {K}"
    return BenchArm(f"plain-go-muon-{K}", title, "yardstick", linear_only(build), K)


BASELINES = (
    BenchArm(
        "torch-muon",
        "torch Muon",
        "torch",
        beside_adamw(lambda matrices: torch.optim.Muon(matrices, lr=RATE), two_dimensional=True),
        note="multiplies in bfloat16, which is slow on processors without bfloat16 units",
    ),
    BenchArm(
        "newton-schulz",
        "five Newton–Schulz steps",
        "yardstick",
        beside_adamw(lambda matrices: NewtonSchulzMuon(matrices, lr=RATE)),
        note="float32, equal shapes in one batch; singular values end somewhere around one",
    ),
    plain_go_muon_arm(1),
    plain_go_muon_arm(4),
    BenchArm(
        "plain-muon",
        "plain script, Muon",
        "yardstick",
        linear_only(lambda model: plain_muon(model, RATE)),
    ),
)
MUONS = (
    *both_tiers("Muon"),
    method_arm("Muon", "muon-exact", "exact polar", **EXACT),
    go_muon(1),
    go_muon(4),
    fast("GoMuon", "go-muon-4", "K = 4", refresh_every=4),
    method_arm("GoMuon", "go-muon-4-exact", "K = 4, exact polar", refresh_every=4, **EXACT),
    method_arm("GoMuon", "go-muon-fast", "preset fast", **PRESET),
    go_muon(16),
)
_SHOWN = ("Muon", "GoMuon", "SOAP", "Shampoo", "KFAC", "Mousse")
OWN = (
    BenchArm(
        REFERENCE,
        "torch AdamW",
        "torch",
        lambda model: adamw(list(model.parameters())),
        note="foreach=True; its forward and backward passes are the unit of every time",
    ),
    *MUONS,
    *both_tiers(*_SHOWN[2:]),
    *both_tiers(*(method for method in METHODS if method not in _SHOWN)),
    *BASELINES,
)
