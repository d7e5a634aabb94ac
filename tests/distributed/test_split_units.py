"""A unit whose layers have different owners: exact, the same on all ranks, and it can be saved."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp

from gomuon import KFAC, GoMuon, MuonQK
from gomuon.optimizer import MatrixOptimizer
from tests.distributed.launcher import Place, launch
from tests.distributed.test_checkpoints_of_ranks import load, states
from tests.distributed.test_streaming import eager
from tests.distributed.worlds import Weights, assert_alike, distance, train, weights, wrapped
from tests.models import OneUnit, transformer

STEPS = 20
METHODS: dict[str, tuple[type[MatrixOptimizer], dict[str, Any]]] = {
    "together": (GoMuon, {"stagger": False}),
    "turns": (GoMuon, {"stagger": True, "input_decay": 0.9}),
    "blocks": (GoMuon, {"stagger": True, "block_size": 7, "refresh_every": 3}),
    "KFAC": (KFAC, {"statistics_every": 2, "refresh_every": 4, "stagger": True}),
}


def build(size: int) -> nn.Module:
    """A model that so many ranks can only share if its units are split."""
    return OneUnit(dtype=torch.float64) if size == 2 else transformer(layers=1)


def made(kind: str, method: str, size: int) -> tuple[nn.Module, MatrixOptimizer]:
    model = wrapped(build(size), kind)
    optimizer, settings = METHODS[method]
    return model, optimizer(model, **settings)


def split_runs(
    place: Place, cases: list[tuple[str, str]]
) -> dict[tuple[str, str], tuple[Weights, dict[str, int], int]]:
    """Weights after the training, owners, and messages that were sent in backward passes."""
    found = {}
    for kind, method in cases:
        with eager() as inside:
            model, optimizer = made(kind, method, place.size)
            train(model, optimizer, range(STEPS), place)
        found[kind, method] = weights(model), optimizer.owners(), inside[0]
    return found


@pytest.mark.parametrize(
    ("size", "kinds", "methods"),
    [
        (2, ("ddp", "fsdp"), tuple(METHODS)),
        (4, ("ddp", "fsdp", "hybrid"), ("together", "turns")),
    ],
    ids=["2", "4"],
)
def test_split_units_equal_one_process_with_the_union(
    size: int, kinds: tuple[str, ...], methods: tuple[str, ...], tmp_path: Path
) -> None:
    cases = [(kind, method) for kind in kinds for method in methods]
    answers = launch(size, split_runs, tmp_path, cases=cases)
    for method in methods:
        model, optimizer = made("alone", method, size)
        train(model, optimizer, range(STEPS))
        for kind in kinds:
            ranks = [answer[kind, method][0] for answer in answers]
            assert_alike(ranks)
            assert distance(ranks[0], weights(model)) < 1e-9, (kind, method)
            for _, owners, messages in (answer[kind, method] for answer in answers):
                readers = {owners[name] for name in owners if name.split(".")[-2] in "qkv"}
                assert len(readers) > 1, "layers that read one tensor have several owners"
                assert set(owners.values()) == set(range(size))
                assert messages >= 4, "sums leave in the backward pass"


# ---- saved on n ranks, loaded on m ---------------------------------------------------------------


def go_on(place: Place, kind: str, source: str, target: str) -> Weights:
    model, optimizer = made(kind, "turns", 2)
    if source:
        load(model, optimizer, Path(source))
    train(model, optimizer, range(6, 12) if source else range(6), place)
    if target:
        dcp.save(states(model, optimizer), checkpoint_id=target)
    return weights(model)


@pytest.mark.parametrize(("saved", "loaded"), [((2, "ddp"), (1, "ddp")), ((1, "ddp"), (4, "fsdp"))])
def test_their_state_is_whole_on_any_number_of_ranks(
    saved: tuple[int, str], loaded: tuple[int, str], tmp_path: Path
) -> None:
    """One rank keeps an average of A that q, k and v share; split owners keep one each."""
    folder = str(tmp_path / "checkpoint")
    launch(saved[0], go_on, tmp_path, kind=saved[1], source="", target=folder)
    answers = launch(loaded[0], go_on, tmp_path, kind=loaded[1], source=folder, target="")
    assert_alike(answers)
    model, optimizer = made("alone", "turns", 2)
    train(model, optimizer, range(12))
    assert distance(answers[0], weights(model)) < 1e-9


# ---- a unit that must not be split -----------------------------------------------------------


def owners_of_partners(place: Place) -> dict[str, int]:
    model = wrapped(OneUnit(), "ddp")
    return MuonQK(model, heads=2).owners()


def test_layers_that_read_each_others_weights_stay_together(tmp_path: Path) -> None:
    for owners in launch(4, owners_of_partners, tmp_path):
        assert len(set(owners.values())) == 1
