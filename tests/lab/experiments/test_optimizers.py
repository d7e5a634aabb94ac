"""Optimizers by name: all recipes and variants, and how they are built."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from gomuon.lab.errors import LabError
from gomuon.lab.experiments import optimizers
from gomuon.lab.running import training
from gomuon.lab.running.training import train
from tests.lab.helpers.tiny_runs import addition


def test_names_are_the_recipes_and_their_variants() -> None:
    with pytest.raises(LabError, match="did you mean 'go-muon'"):
        optimizers.find("gomuon")
    spelled = "muon kfac shampoo soap mousse fismo go-muon newton-muon muon-squared malt muon-plus"
    spelled += " muon-eq scion kfac-muon matched-kfac muon-qk halfspace moonlight"
    spelled += " polar-express-muon nor-muon ada-muon sa-muon muon-hyperball dion"
    spelled += " modular-norm gluon soap-muon kl-shampoo klsoap singd qsd"
    spelled += " go-muon-input go-muon-output muon-heads"
    assert optimizers.names() == ["adamw", "gauss-newton", *spelled.split()]
    assert [optimizers.default_rate(n, "ptb") for n in ("muon-heads", "adamw")] == [0.02, 3e-3]
    assert [optimizers.default_rate(n, "grokking") for n in ("muon-heads", "adamw")] == [0.16, 0.01]


@pytest.mark.parametrize("name", optimizers.names())
def test_every_name_can_be_trained_with(name: str) -> None:
    session = training.Session(addition(optimizer=name, lr=1e-3, steps=3, telemetry=True))
    line, _ = [session.update(step) for step in (1, 2, 3)][-1]
    assert math.isfinite(line["loss"])
    assert ("negative_source" in line) == (name not in optimizers.OTHERS)


def test_variants_differ_from_their_recipes_where_they_say() -> None:
    by_input = training.Session(addition(optimizer="go-muon-input")).optimizer
    assert by_input.param_groups[0]["alpha"] == (0.0, 0.25)
    moves = {}
    for name in ("muon", "muon-heads"):
        session = training.Session(addition(optimizer=name, lr=0.1, heads=2))
        before = {key: value.clone() for key, value in session.model.state_dict().items()}
        session.update(1)
        moved = {key: value - before[key] for key, value in session.model.state_dict().items()}
        moves[name] = moved
    same = {key for key in moves["muon"] if torch.allclose(*(m[key] for m in moves.values()))}
    apart = {key.split(".")[-2] for key in set(moves["muon"]) - same}
    assert apart == set("qkvo")


def test_an_optimizers_refusal_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="invalid settings of optimizer 'go-muon'") as caught:
        train(addition(optimizer="go-muon", options={"colour": 1}), tmp_path)
    assert "\n" not in str(caught.value)


def test_both_groups_follow_the_schedule() -> None:
    session = training.Session(addition(optimizer="go-muon", lr=0.08, adamw_lr=0.01, steps=60))
    session.update(25)
    assert [group["lr"] for group in session.optimizer.param_groups] == pytest.approx([0.04, 0.005])


def test_adamws_decay_leaves_norms_and_biases_alone() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    options = {"weight_decay": 0.1, "betas": [0.9, 0.99]}
    optimizer = optimizers.build("adamw", model, 1e-3, 1e-3, dict(options))
    decays = {
        name: group["weight_decay"]
        for name, parameter in model.named_parameters()
        for group in optimizer.param_groups
        if any(parameter is one for one in group["params"])
    }
    assert decays == {"0.weight": 0.1, "0.bias": 0.0, "1.weight": 0.0, "1.bias": 0.0}
    assert all(tuple(group["betas"]) == (0.9, 0.99) for group in optimizer.param_groups)


def test_adamws_scale_has_one_rate_and_one_decay_for_all_groups() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5))
    options = {"lr_scale": "adamw", "weight_decay": 0.1, "betas": [0.9, 0.99]}
    optimizer = optimizers.build("go-muon", model, 2e-3, 7e-3, options)
    assert {group["lr"] for group in optimizer.param_groups} == {2e-3}
    assert {group.get("adamw_lr", 2e-3) for group in optimizer.param_groups} == {2e-3}
