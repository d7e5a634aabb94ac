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

from gomuon import GoMuon
from gomuon.distributed import owners
from gomuon.errors import GeometryWarning, NonFiniteGradientError, RankError
from gomuon.optimizer import MatrixOptimizer
from gomuon.parameters.sharding import local
from tests.distributed.launcher import Place, launch
from tests.distributed.test_checkpoints_of_ranks import load, made, states, uninterrupted
from tests.distributed.worlds import (
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
from tests.models import tokens, transformer
from tests.versions import ONE_PROCESS

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


def bad_gradient(
    place: Place, kind: str, work: str, nonfinite: str
) -> tuple[tuple[str, str], bool, Weights]:
    model, optimizer = fresh(kind, nonfinite=nonfinite, work=work)
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


@pytest.mark.parametrize(
    ("kind", "work"), [("ddp", "auto"), ("ddp", "replicated"), ("fsdp", "auto")]
)
@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_a_gradient_that_is_not_finite_on_one_rank(
    kind: str, work: str, nonfinite: str, tmp_path: Path
) -> None:
    answers = launch(2, bad_gradient, tmp_path, kind=kind, work=work, nonfinite=nonfinite)
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
    model, optimizer = fresh(refresh_every=2, stagger=False)
    train(model, optimizer, range(2), place)
    optimizer.zero_grad()
    spoilt = []
    if place.rank == 1:
        hook = optimizer._capture.groups[0]._hooks[parameter_of(model, MATRIX)][0]

        def spoil(total: Tensor) -> Tensor:
            """Before it is delivered, because it may leave for its owner right then."""
            spoilt.append(total.shape)
            return torch.full_like(total, torch.nan)

        handle = hook.gradients.total.register_hook(spoil)
    backward(place, model, 2)
    if place.rank == 1:
        handle.remove()
    assert len(spoilt) == place.rank
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

    def observe(geometry: Any, due: Any, stacks: Any, group: Any) -> Any:
        if any(layer.name == MATRIX for stack in stacks for layer in stack.layers):
            raise MemoryError("there is none left")
        return real(geometry, due, stacks, group)

    kind: Any = type(recipe.geometry)
    real = kind.observe
    if where == "geometry":
        kind.observe = observe
    else:
        optimizer._step.recipe = dataclasses.replace(recipe, direction=direction)
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


def different(place: Place, what: str, work: str) -> tuple[str, str]:
    lr = 0.1 if what == "lr" and place.rank == 1 else 0.2
    width = 16 + 4 * (what == "model" and place.rank == 1)
    model = transformer(layers=1, width=width)  # not wrapped, for DDP looks for itself
    optimizer = GoMuon(model, lr=lr, work=work)
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
        ("gradient", f"'{MATRIX}' has one on rank 0 and none on rank 1"),
    ],
)
@pytest.mark.parametrize("work", ["shared", "replicated"])
def test_ranks_that_differ_are_told_at_the_first_step(
    what: str, words: str, work: str, tmp_path: Path
) -> None:
    for rank, (name, said) in enumerate(launch(2, different, tmp_path, what=what, work=work)):
        assert name == RankError.__name__
        assert words.format(rank=rank) in said


CHANGES: dict[str, tuple[Any, Any]] = {
    "lr": (0.08, 0.01),
    "refresh_every": (4, 3),
    "momentum": (0.8, 0.9),
    "adamw": ({"lr": 3e-3}, {"lr": 1e-3}),
}


def drifting(
    place: Place, kind: str, work: str, keys: list[str]
) -> list[tuple[tuple[str, str], bool, bool]]:
    """A setting is changed on one rank after two steps, and later on the other as well."""
    found = []
    model, optimizer = fresh(kind, work=work)
    train(model, optimizer, range(2), place)
    for key in keys:
        groups, step = optimizer.param_groups, optimizer.param_groups[0]["step"]
        new = CHANGES[key][1]
        new = {**groups[0]["adamw"], **new} if key == "adamw" else new
        if place.rank == 1:
            groups[0][key] = new
        before = weights(model)
        told = raised(lambda step=step: train(model, optimizer, range(step, step + 1), place))
        unchanged = distance(weights(model), before) == 0
        groups[0][key] = new
        train(model, optimizer, range(step, step + 1), place)
        found.append((told, unchanged, distance(weights(model), before) > 0))
    return found


@pytest.mark.parametrize(
    ("kind", "work"), [("ddp", "auto"), ("ddp", "replicated"), ("fsdp", "auto")]
)
def test_settings_changed_on_one_rank_are_told_before_anything_moves(
    kind: str, work: str, tmp_path: Path
) -> None:
    answers = launch(2, drifting, tmp_path, kind=kind, work=work, keys=list(CHANGES))
    for rank, answer in enumerate(answers):
        for (key, values), ((name, said), unchanged, went_on) in zip(
            CHANGES.items(), answer, strict=True
        ):
            assert name == RankError.__name__
            assert f"ranks differ in {key} of group 0: rank {rank} has" in said
            for value in values:
                shown = repr(value["lr"] if isinstance(value, dict) else value)
                assert shown in said
            assert unchanged
            assert went_on


def plateau(place: Place) -> tuple[tuple[str, str], int]:
    """Each rank's scheduler looks at its own loss."""
    model, optimizer = fresh()
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for step in range(4):
        told = raised(lambda step=step: train(model, optimizer, range(step, step + 1), place))
        if told[0]:
            return told, step
        scheduler.step(1.0 if place.rank else 1.0 - step)
    return ("", ""), 4


def test_a_scheduler_that_looks_at_one_ranks_loss_is_told(tmp_path: Path) -> None:
    for rank, ((name, said), step) in enumerate(launch(2, plateau, tmp_path)):
        assert name == RankError.__name__
        assert f"ranks differ in lr of group 0: rank {rank} has" in said
        assert step == 2


def later_without(place: Place, work: str) -> tuple[tuple[str, str], bool, Weights]:
    """A rank loses a gradient in its third step."""
    model, optimizer = fresh(work=work)
    train(model, optimizer, range(2), place)
    before = weights(model)
    optimizer.zero_grad()
    backward(place, model, 2)
    if place.rank == 1:
        parameter_of(model, MATRIX).grad = None
    told = raised(optimizer.step)
    unchanged = distance(weights(model), before) == 0
    train(model, optimizer, range(3, 5), place)
    return told, unchanged, weights(model)


@pytest.mark.parametrize("work", ["shared", "replicated"])
def test_a_gradient_missing_later_is_named(work: str, tmp_path: Path) -> None:
    answers = launch(2, later_without, tmp_path, work=work)
    for (name, said), unchanged, _ in answers:
        assert name == RankError.__name__
        assert f"'{MATRIX}' has one on rank 0 and none on rank 1" in said
        assert unchanged
    assert_alike([trained for _, _, trained in answers])


def failing_replica(place: Place, where: str) -> tuple[tuple[str, str], float]:
    """Rank 1 of two that both do everything raises; before its messages, or after them."""
    model, optimizer = fresh(refresh_every=1, work="replicated")
    train(model, optimizer, range(2), place)
    optimizer.zero_grad()
    backward(place, model, 2)
    if place.rank == 1:

        def fail(*args: Any, **kwargs: Any) -> Any:
            raise MemoryError("there is none left")

        if where == "before":
            optimizer._capture.collect = fail  # type: ignore[method-assign]
        else:
            optimizer._step.recipe = dataclasses.replace(optimizer.recipe, direction=fail)
    begin = time.monotonic()
    told = raised(optimizer.step)
    return told, time.monotonic() - begin


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_replica_that_raises_is_told_to_the_others(where: str, tmp_path: Path) -> None:
    for rank, ((name, said), took) in enumerate(launch(2, failing_replica, tmp_path, where=where)):
        assert name == ("MemoryError" if rank else RankError.__name__)
        assert "there is none left" in said
        assert "rank 1" in said
        assert ("No weight was changed" in said) == (where == "before" and not rank)
        assert ("continue from the last checkpoint" in said) == (where == "after" and not rank)
        assert took < 20


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

        setattr(owners.Owners, moment, die)
    begin = time.monotonic()
    told = raised(optimizer.step)
    return told, time.monotonic() - begin


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("size", "kind", "moment", "delay"),
    [(2, "ddp", "send", 0), (4, "fsdp", "sum_statistics", 0), (2, "ddp", "send", 12)],
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
        assert "continue from the last checkpoint" in words
        assert took < 10  # at once, or when the group's time is up
    model, optimizer = made("alone", 9, "GoMuon")
    load(model, optimizer, folder, **ONE_PROCESS)
    train(model, optimizer, range(6, 12))
    assert distance(weights(model), uninterrupted("GoMuon", range(12))) < 1e-9
