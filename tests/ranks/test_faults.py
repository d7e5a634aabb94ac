"""One rank that fails does not leave the others waiting, and all of them decide alike."""

import dataclasses
import os
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp

from gomuon import GoMuon, exchange
from gomuon.errors import GeometryWarning, NonFiniteGradientError, RankError
from gomuon.holdings import local
from gomuon.optimizer import MatrixOptimizer
from tests.models import tokens, transformer
from tests.ranks.launcher import Place, launch
from tests.ranks.test_checkpoints import load, made, states, uninterrupted
from tests.ranks.worlds import (
    SHARES,
    UNION,
    Weights,
    assert_alike,
    distance,
    language_loss,
    train,
    weights,
    wrapped,
)

MATRIX = "trunk.blocks.0.mlp.up.weight"


def fresh(kind: str = "ddp", **settings: Any) -> tuple[nn.Module, MatrixOptimizer]:
    model = wrapped(transformer(layers=1), kind)
    return model, GoMuon(model, **settings)


def backward(place: Place, model: nn.Module, step: int = 0) -> None:
    window = tokens(step, UNION)
    mine = window[place.share(SHARES[place.size])]
    language_loss(model, mine, window[:, 1:].numel(), place.size).backward()


def raised(act: Any) -> tuple[str, str]:
    """The exception's type and words, notes included; what is expected here."""
    try:
        act()
    except Exception as failure:
        return type(failure).__name__, "; ".join([str(failure), *getattr(failure, "__notes__", ())])
    return "", ""


def parameter_of(model: nn.Module, name: str) -> nn.Parameter:
    return next(p for n, p in model.named_parameters() if n.endswith(name))


# ---- gradients and factors -----------------------------------------------------------------------


def bad_gradient(place: Place, kind: str, nonfinite: str) -> tuple[tuple[str, str], bool, Weights]:
    model, optimizer = fresh(kind, nonfinite=nonfinite)
    train(model, optimizer, range(2), place)
    before = weights(model)
    optimizer.zero_grad()
    backward(place, model, 2)
    if place.rank == 1:
        gradient = parameter_of(model, MATRIX).grad
        assert gradient is not None
        local(gradient)[0, 0] = torch.nan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GeometryWarning)
        told = raised(optimizer.step)
    unchanged = distance(weights(model), before) == 0
    train(model, optimizer, range(3, 5), place)
    return told, unchanged, weights(model)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_a_gradient_that_is_not_finite_on_one_rank(
    kind: str, nonfinite: str, tmp_path: Path
) -> None:
    answers = launch(2, bad_gradient, tmp_path, kind=kind, nonfinite=nonfinite)
    for (name, words), unchanged, _ in answers:
        assert unchanged
        if nonfinite == "raise":
            assert name == NonFiniteGradientError.__name__
            assert "on rank 1" in words
            assert MATRIX in words
        else:
            assert name == ""
    assert_alike([trained for _, _, trained in answers])


def bad_factor(place: Place) -> tuple[Weights, int]:
    """One rank's sum of output gradients is spoilt on the second refresh."""
    model, optimizer = fresh(refresh_every=2)
    train(model, optimizer, range(2), place)
    optimizer.zero_grad()
    backward(place, model, 2)
    if place.rank == 1:
        hook = optimizer._captures[0]._hooks[parameter_of(model, MATRIX)][0]
        total = hook.gradients.leaves[0].grad
        assert total is not None
        total.fill_(torch.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GeometryWarning)
        optimizer.step()
    failures = sum(entries.get("failures", 0) for entries in optimizer.state.values())
    train(model, optimizer, range(3, 6), place)
    return weights(model), failures


def test_a_factor_that_is_not_finite_on_one_rank_is_left_out_on_all(tmp_path: Path) -> None:
    answers = launch(2, bad_factor, tmp_path)
    assert_alike([trained for trained, _ in answers])
    assert sorted(failures for _, failures in answers) == [0, 1]  # its owner counts it
    assert all(tensor.isfinite().all() for tensor in answers[0][0].values())


# ---- a rank that raises --------------------------------------------------------------------------


def failing_owner(place: Place, where: str) -> tuple[tuple[str, str], bool, float, int]:
    model, optimizer = fresh(refresh_every=1)
    train(model, optimizer, range(2), place)
    owner = optimizer.owners()[MATRIX]
    before = weights(model)
    optimizer.zero_grad()
    backward(place, model, 2)
    recipe = optimizer.recipe

    def direction(source: Tensor, stack: Any, group: Any) -> Tensor:
        if any(layer.name == MATRIX for layer in stack.layers):
            raise MemoryError("there is none left")
        return recipe.direction(source, stack, group)

    def before_it(geometry: Any, stacks: Any, group: Any) -> Any:
        if any(layer.name == MATRIX for stack in stacks for layer in stack.layers):
            raise MemoryError("there is none left")
        return real(geometry, stacks, group)

    kind: Any = type(recipe.geometry)
    real = kind.before
    if where == "geometry":
        kind.before = before_it
    else:
        type(optimizer).recipe = dataclasses.replace(recipe, direction=direction)
    begin = time.monotonic()
    told = raised(optimizer.step)
    took = time.monotonic() - begin
    return told, distance(weights(model), before) == 0, took, owner


@pytest.mark.parametrize("where", ["direction", "geometry"])
def test_an_owner_that_raises_is_named_with_its_layer(where: str, tmp_path: Path) -> None:
    answers = launch(2, failing_owner, tmp_path, where=where)
    owner = answers[0][3]
    for rank, ((name, words), unchanged, took, _) in enumerate(answers):
        assert name == ("MemoryError" if rank == owner else "RankError")
        assert f"rank {owner}" in words
        # Factors of all layers are decomposed together: the first few are named.
        assert (MATRIX if where == "direction" else "in the step of 'trunk.blocks.0") in words
        assert "there is none left" in words
        assert unchanged
        assert took < 20


# ---- ranks that differ ---------------------------------------------------------------------------


def different(place: Place, what: str) -> tuple[str, str]:
    lr = 0.1 if what == "lr" and place.rank == 1 else 0.2
    width = 16 + 4 * (what == "model" and place.rank == 1)
    model = transformer(layers=1, width=width)  # not wrapped, for DDP looks for itself
    optimizer = GoMuon(model, lr=lr)
    window = tokens(0, UNION)
    language_loss(model, window, window.numel(), 1).backward()
    if what == "gradient" and place.rank == 1:
        parameter_of(model, MATRIX).grad = None
    return raised(optimizer.step)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("lr", "lr of group 0: rank {rank} has"),
        ("model", "ranks differ in parameter '"),
        ("gradient", "which parameters have a gradient"),
    ],
)
def test_ranks_that_differ_are_told_at_the_first_step(
    what: str, words: str, tmp_path: Path
) -> None:
    for rank, (name, said) in enumerate(launch(2, different, tmp_path, what=what)):
        assert name == RankError.__name__
        assert words.format(rank=rank) in said


# ---- a rank that dies ----------------------------------------------------------------------------


def killed(
    place: Place, kind: str, target: str, moment: str, delay: int
) -> tuple[tuple[str, str], float]:
    """Save, then lose rank 1 in the middle of a later step."""
    model, optimizer = made(kind, 0, "GoMuon")
    train(model, optimizer, range(6), place)
    dcp.save(states(model, optimizer), checkpoint_id=target)
    train(model, optimizer, range(6, 8), place)
    optimizer.zero_grad()
    backward(place, model, 8)
    dist.barrier()
    if place.rank == 1:

        def die(*args: Any, **kwargs: Any) -> None:
            time.sleep(delay)
            os._exit(7)

        setattr(exchange.Exchange, moment, die)
    begin = time.monotonic()
    told = raised(optimizer.step)
    return told, time.monotonic() - begin


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("size", "kind", "moment", "delay"),
    [(2, "ddp", "send_steps", 0), (4, "fsdp", "gather_moments", 0), (2, "ddp", "send_steps", 12)],
    ids=["sending", "collecting", "stalling"],
)
def test_a_rank_that_dies_leaves_an_error_and_a_checkpoint(
    size: int, kind: str, moment: str, delay: int, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint"
    answers = launch(
        size, killed, tmp_path, dying=(1,), time_out=5 if delay else 30,
        kind=kind, target=str(folder), moment=moment, delay=delay,
    )  # fmt: skip
    for answer in [answer for answer in answers if answer is not None]:
        (name, words), took = answer
        assert name == RankError.__name__, words
        assert "go on from the last checkpoint" in words
        assert took < 10  # at once, or when the group's time is up
    model, optimizer = made("alone", 9, "GoMuon")
    load(model, optimizer, folder, no_dist=True)
    train(model, optimizer, range(6, 12))
    assert distance(weights(model), uninterrupted("GoMuon", range(12))) < 1e-9
