"""Printing an optimizer says every setting once."""

import torch
from torch import nn

from gomuon import GoMuon
from gomuon.parameters.described_groups import described_groups
from tests.models import mlp


def test_what_groups_share_is_said_once() -> None:
    optimizer = GoMuon(mlp(3, 4, 4, 2), lr=0.05, overrides={"0.weight": {"alpha": 0.125}})
    text = str(optimizer)
    for key in ("momentum", "shrinkage", "polar", "refresh_every"):
        assert text.count(f"    {key}: ") == 1, key
    assert text.count("    alpha: ") == 2  # that of most groups, and the other
    assert text.count("    adamw: ") == 1
    assert "Parameter Group 0: matrix, 1 parameter\n" in text
    assert "Parameter Group 1: adamw, 4 parameters\n" in text
    first, second, third = text.split("Parameter Group ")[1:]
    assert "lr: 0.05" in first
    assert "lr: 0.003" in second
    assert "alpha: 0.125" in third
    # Nothing is left out.
    for group in optimizer.param_groups:
        for key in group.keys() - {"params", "param_names", "treatment"}:
            assert f"    {key}: " in text, key


def test_values_that_cannot_be_compared_are_said_for_each_group() -> None:
    vectors = [{"params": [], "treatment": "adamw", "own": torch.zeros(3)} for _ in range(2)]
    assert described_groups(vectors).count("own: ") == 2
    alone = GoMuon(nn.Sequential(nn.Linear(3, 3, bias=False)))
    assert "Settings, where" not in str(alone)
    assert str(alone).count("    momentum: ") == 1
