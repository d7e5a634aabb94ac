"""A checkpoint brings whether layers take turns: geometry stays, and each refreshes at its turn."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gomuon import GoMuon
from gomuon.optimizer import MatrixOptimizer
from tests.models import train, transformer

STILL: dict[str, Any] = {"lr": 0.0, "adamw": {"lr": 0.0}}  # so that moments can be taken again
BETA = 0.9
SAVED_AT = 6


def factors(model: nn.Module, optimizer: MatrixOptimizer) -> dict[str, Tensor]:
    """B̄ of every layer that has one."""
    return {
        name: optimizer.state[p]["left_factor"].clone()
        for name, p in model.named_parameters()
        if "left_factor" in optimizer.state[p]
    }


def observed(step: int) -> dict[str, Tensor]:
    """B of every layer in one step: what an average without a memory keeps."""
    model = transformer(layers=2)
    optimizer = GoMuon(model, refresh_every=1, factor_decay=0.0, **STILL)
    train(model, optimizer, range(step, step + 1))
    return factors(model, optimizer)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"stagger": False}, {"stagger": True}),
        ({"stagger": True}, {"stagger": False}),
        ({"stagger": True}, {"stagger": True, "refresh_every": 3}),
    ],
    ids=["begins", "ends", "other K"],
)
def test_layers_keep_their_geometry_until_their_new_turn(
    before: dict[str, Any], after: dict[str, Any]
) -> None:
    settings = {"refresh_every": 4, "factor_decay": BETA, **STILL}
    model = transformer(layers=2)
    first = GoMuon(model, **{**settings, **before})
    train(model, first, range(SAVED_AT))
    saved = first.state_dict()
    for group in saved["param_groups"]:
        group.update(after)

    second = GoMuon(model, **{**settings, **before})
    second.load_state_dict(saved)
    every = {**settings, **after}["refresh_every"]
    known = factors(model, first)
    assert factors(model, second).keys() == known.keys()
    seen = {p: first.state[p]["left_seen"] for p in first.state if "left_seen" in first.state[p]}
    phases = second._layout.phases
    assert bool(phases) == after["stagger"]
    refreshed: dict[str, list[int]] = {name: [] for name in known}
    for step in range(SAVED_AT, SAVED_AT + 2 * every):
        train(model, second, range(step, step + 1))
        now, B = factors(model, second), observed(step)
        for name, p in model.named_parameters():
            if name not in known:
                continue
            if step % every == int(phases.get(p, 0.0) * every):
                refreshed[name].append(step)
                kept = BETA ** (step - seen[p])  # by the steps since its last refresh
                expected = kept * known[name] + (1 - kept) * B[name]
                torch.testing.assert_close(now[name], expected, rtol=1e-10, atol=1e-12)
                known[name], seen[p] = now[name], step
            else:
                assert torch.equal(now[name], known[name]), "not its turn"
    assert all(len(steps) == 2 for steps in refreshed.values())
    turns = {steps[0] % every for steps in refreshed.values()}
    assert turns == (set(range(every)) if after["stagger"] else {0})
