"""With whom an optimizer works when nobody says it: with a wrapper's ranks, else with nobody."""

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed import checkpoint as dcp
from torch.nn.parallel import DistributedDataParallel

from gomuon import KFAC, GoMuon, LayerSpec, Muon
from gomuon.errors import GeometryWarning, RankError
from gomuon.optimizer import MatrixOptimizer
from tests.distributed.launcher import Place, launch
from tests.distributed.test_checkpoints_of_ranks import load, made, states, uninterrupted
from tests.distributed.test_faults import raised
from tests.distributed.worlds import (
    SHARES,
    UNION,
    Weights,
    assert_alike,
    distance,
    language_loss,
    train,
    weights,
)
from tests.models import tokens, transformer

METHODS: dict[str, type[MatrixOptimizer]] = {"GoMuon": GoMuon, "Muon": Muon, "KFAC": KFAC}
ALONE = "each rank trains alone"


def train_alone(model: nn.Module, optimizer: MatrixOptimizer, steps: int) -> None:
    """As ranks do whose wrapper is found in the first forward pass: they take turns afterwards."""
    train(model, optimizer, range(1))
    for group in optimizer.param_groups:
        if "stagger" in group:
            group["stagger"] = True
    optimizer.load_state_dict(optimizer.state_dict())  # places the hooks by the new setting
    train(model, optimizer, range(1, steps))


@contextmanager
def silence() -> Iterator[None]:
    """Nothing may be sent."""

    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a message")

    names = ("all_gather", "all_reduce", "all_to_all_single", "all_gather_object")
    real = {name: getattr(dist, name) for name in names}
    for name in names:
        setattr(dist, name, never)
    try:
        yield
    finally:
        for name, function in real.items():
            setattr(dist, name, function)


# ---- a model of one's own ------------------------------------------------------------------------


def ensemble(place: Place, method: str) -> tuple[Weights, list[str]]:
    model = transformer(seed=place.rank, layers=1)
    optimizer = METHODS[method](model)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with silence():
            train(model, optimizer, range(place.rank, place.rank + 6))
            optimizer.load_state_dict(optimizer.state_dict())
            train(model, optimizer, range(6, 8))
            assert optimizer.owners() == {}
            assert optimizer.consolidated_state_dict()["state"]
    words = [str(w.message) for w in told if issubclass(w.category, GeometryWarning)]
    return weights(model), words


@pytest.mark.parametrize("method", METHODS)
def test_ranks_with_models_of_their_own_are_left_alone(method: str, tmp_path: Path) -> None:
    for rank, (trained, words) in enumerate(launch(2, ensemble, tmp_path, method=method)):
        model = transformer(seed=rank, layers=1)
        optimizer = METHODS[method](model)
        train(model, optimizer, range(rank, rank + 6))
        train(model, optimizer, range(6, 8))
        assert distance(trained, weights(model)) < 1e-12
        # Equal steps come of equal gradients, but not of each rank's own statistics.
        assert [ALONE in said for said in words] == ([] if method == "Muon" else [True])


def parameters_only(place: Place) -> Weights:
    model = DistributedDataParallel(transformer(layers=1))
    optimizer = Muon(model.parameters())
    for step in range(4):
        optimizer.zero_grad()
        window = tokens(step, 4)[2 * place.rank :][:2]
        language_loss(model, window, window.numel(), 1).backward()
        with silence():
            optimizer.step()
    return weights(model)


def test_bare_parameters_take_equal_steps_without_a_message(tmp_path: Path) -> None:
    assert_alike(launch(2, parameters_only, tmp_path))


# ---- wrapped, at any time ------------------------------------------------------------------------


def turns_taken(place: Place, wrapped_first: bool) -> list[set[str]]:
    """The layers that are captured in each step."""
    model = transformer(layers=2)
    if wrapped_first:
        outer = DistributedDataParallel(model)
        optimizer = GoMuon(outer)
    else:
        optimizer = GoMuon(model)
        outer = DistributedDataParallel(model)
    names: dict[torch.Tensor, str] = {p: name for name, p in model.named_parameters()}
    captured = []
    for step in range(9):
        captured.append({names[p] for p in optimizer._capture.groups[0].shapes()})
        train(outer, optimizer, range(step, step + 1), place)
    return captured


@pytest.mark.parametrize("wrapped_first", [True, False])
def test_layers_take_turns_as_soon_as_the_wrapper_is_known(
    wrapped_first: bool, tmp_path: Path
) -> None:
    """Known from the start, or after the first step, in which then all layers refresh."""
    model = transformer(layers=2)
    table = GoMuon(model).routing_table()
    every = {row.name for row in table.treated("matrix")}
    one, other = launch(2, turns_taken, tmp_path, wrapped_first=wrapped_first)
    assert one == other
    assert (one[0] == every) != wrapped_first
    assert one[1:5] == one[5:9]
    assert set.union(*one[1:5]) == every
    assert sum(map(len, one[1:5])) == len(every), "each layer once in K steps"
    assert all(0 < len(names) < len(every) for names in one[1:5])


class Holder(nn.Module):
    """Has parts and no forward pass of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList([model])


def wrapped_later(place: Place, way: str, method: str) -> tuple[Weights, set[int], int]:
    model: Any = transformer(layers=2)
    make = METHODS[method]
    if way == "before":
        outer: Any = DistributedDataParallel(model)
        optimizer = make(model)
    elif way == "held":
        optimizer = make(Holder(model))
        outer = DistributedDataParallel(model)
    elif way == "around":
        optimizer = make(model)
        outer = DistributedDataParallel(nn.Sequential(model))
    elif way == "copied":
        model, optimizer = copy.deepcopy((model, make(model)))
        outer = DistributedDataParallel(model)
    elif way == "compiled outside":
        optimizer = make(model)
        outer = torch.compile(DistributedDataParallel(model), backend="aot_eager")
    elif way == "compiled inside":
        optimizer = make(model)
        outer = DistributedDataParallel(torch.compile(model, backend="aot_eager"))
    else:
        optimizer = make(model)
        outer = DistributedDataParallel(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", GeometryWarning)
        train(outer, optimizer, range(6), place)
    return weights(model), set(optimizer.owners().values()), sum(counters["graph_break"].values())


@pytest.mark.parametrize(
    ("way", "method"),
    [
        ("after", "GoMuon"),
        ("after", "Muon"),
        ("after", "KFAC"),
        ("before", "GoMuon"),
        ("held", "GoMuon"),
        ("around", "GoMuon"),
        ("copied", "GoMuon"),
        ("compiled outside", "GoMuon"),
        ("compiled inside", "GoMuon"),
    ],
)
def test_a_wrapper_is_found(way: str, method: str, tmp_path: Path) -> None:
    answers = launch(2, wrapped_later, tmp_path, way=way, method=method)
    assert_alike([trained for trained, _, _ in answers])
    model = transformer(layers=2)
    train_alone(model, METHODS[method](model), 6)
    for trained, owners, breaks in answers:
        assert owners == {0, 1}
        assert distance(trained, weights(model)) < 1e-9
        assert breaks == 0 or way == "compiled outside"  # those are torch's own, around the model


def part_wrapped(place: Place) -> set[int]:
    """Every part that is trained is wrapped by itself, within the model."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))).double()
    for index in range(3):
        model[index] = DistributedDataParallel(model[index])
    optimizer = GoMuon(model)
    for step in range(3):
        torch.manual_seed(10 * step + place.rank)
        optimizer.zero_grad()
        model(torch.randn(8, 4, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, weights(model))
    assert_alike(everyone)
    return set(optimizer.owners().values())


def test_wrappers_within_the_model_are_found(tmp_path: Path) -> None:
    assert launch(2, part_wrapped, tmp_path) == [{0, 1}] * 2


def pairs(place: Place) -> Weights:
    """The optimizer takes the group of a wrapper that comes later."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair, within = divmod(place.rank, 2)
    model = transformer(seed=pair, layers=1)
    optimizer = GoMuon(model)
    outer = DistributedDataParallel(model, process_group=groups[pair])
    train(outer, optimizer, range(4), Place(within, 2, place.folder))
    return weights(model)


def test_the_group_is_the_wrappers(tmp_path: Path) -> None:
    answers = launch(4, pairs, tmp_path)
    for pair in range(2):
        model = transformer(seed=pair, layers=1)
        train_alone(model, GoMuon(model), 4)
        assert_alike(answers[2 * pair : 2 * pair + 2])
        assert distance(answers[2 * pair], weights(model)) < 1e-9


# ---- a checkpoint that comes before the wrapper is known -----------------------------------------


def resumed(place: Place, how: str, target: str) -> tuple[Weights, list[str]]:
    """Saved by wrapped ranks; loaded by an optimizer whose model is wrapped after it was made."""
    model, optimizer = made("ddp", 0, "GoMuon")
    train(model, optimizer, range(6), place)
    whole, part = optimizer.consolidated_state_dict(), optimizer.state_dict()
    dcp.save(states(model, optimizer), checkpoint_id=target)
    inner, other = made("alone", 9, "GoMuon")
    outer = DistributedDataParallel(inner)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if how == "directory":
            load(outer, other, Path(target))
        else:
            inner.load_state_dict(model.module.state_dict())  # type: ignore[union-attr]
            other.load_state_dict(whole if how == "whole" else part)
        train(outer, other, range(6, 12), place)
    held = {name: len(other.state[p]) for name, p in inner.named_parameters() if p.ndim == 2}
    for name, owner in other.owners().items():
        assert (held[name] == 1) == (owner != place.rank), "what others own is let go"
    return weights(outer), [str(w.message) for w in told if w.category is GeometryWarning]


@pytest.mark.parametrize("how", ["whole", "part", "directory"])
def test_a_state_loaded_before_the_wrapper_is_found(how: str, tmp_path: Path) -> None:
    answers = launch(2, resumed, tmp_path, how=how, target=str(tmp_path / "checkpoint"))
    assert_alike([trained for trained, _ in answers])
    assert distance(answers[0][0], uninterrupted("GoMuon", range(12))) < 1e-9
    assert [words for _, words in answers] == [[], []]


# ---- sharing needs equal weights and equal gradients ---------------------------------------------


def unwrapped(
    place: Place, work: str, averaged: bool, dtype: torch.dtype, seeds: tuple[int, int] = (0, 0)
) -> tuple[tuple[str, str], bool, Weights]:
    """Each rank has its own batches and a model without a wrapper."""
    model = transformer(seed=seeds[place.rank], layers=1, dtype=dtype)
    optimizer = GoMuon(model, work=work)
    before = weights(model)

    def steps() -> None:
        for step in range(3):
            optimizer.zero_grad()
            window = tokens(step, UNION)[3 * place.rank :][:3]
            language_loss(model, window, window.numel(), 1).backward()
            for parameter in model.parameters() if averaged else ():
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad)
            optimizer.step()

    told = raised(steps)
    counted = any(group["step"] for group in optimizer.param_groups)
    untouched = distance(weights(model), before) == 0 and not optimizer.state and not counted
    return told, untouched, weights(model)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("work", ["shared", "replicated"])
def test_gradients_nobody_averaged_are_told(work: str, dtype: torch.dtype, tmp_path: Path) -> None:
    run = partial(launch, 2, unwrapped, tmp_path, work=work, dtype=dtype)
    for (name, said), untouched, _ in run(averaged=False):
        assert name == RankError.__name__
        assert "the gradient of '" in said
        assert "on rank 0 and" in said
        assert "wrap the model in DistributedDataParallel" in said
        assert 'work="alone"' in said
        assert untouched
    answers = run(averaged=True)
    assert [name for (name, _), _, _ in answers] == ["", ""]
    assert_alike([trained for _, _, trained in answers])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("work", ["shared", "replicated"])
def test_models_that_differ_are_told_although_gradients_are_averaged(
    work: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"work": work, "averaged": True, "dtype": dtype, "seeds": (0, 1)}
    for (name, said), untouched, _ in launch(2, unwrapped, tmp_path, **settings):
        assert name == RankError.__name__
        assert "the weight of '" in said
        assert "start from equal weights" in said
        assert 'work="alone"' in said
        assert untouched


def averaged_or_wrapped(place: Place, how: str) -> tuple[Weights, dict[str, int]]:
    """Gradients are averaged by the loop or by the wrapper, over the same shares of a batch."""
    model = transformer(layers=1)
    outer: nn.Module = DistributedDataParallel(model) if how == "ddp" else model
    optimizer = GoMuon(outer, work="auto" if how == "ddp" else "shared")
    for step in range(6):
        optimizer.zero_grad()
        # Two micro-batches: only the second makes gradients equal.
        for part in (0, 1):
            last = part == 1
            window = tokens(2 * step + part, UNION)[place.share(SHARES[2])]
            hold = (
                outer.no_sync()
                if isinstance(outer, DistributedDataParallel) and not last
                else nullcontext()
            )
            with hold:
                language_loss(outer, window, 2 * tokens(0, UNION)[:, 1:].numel(), 2).backward()
        for parameter in model.parameters() if how == "loop" else ():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= 2
        optimizer.step()
    return weights(model), optimizer.owners()


def test_shared_work_on_averaged_gradients_equals_ddp(tmp_path: Path) -> None:
    wrapped, by_hand = (
        launch(2, averaged_or_wrapped, tmp_path, how=how) for how in ("ddp", "loop")
    )
    assert_alike([trained for trained, _ in by_hand])
    assert distance(by_hand[0][0], wrapped[0][0]) < 1e-12
    assert by_hand[0][1] == wrapped[0][1]
    assert set(by_hand[0][1].values()) == {0, 1}


def wrapped_in_part(place: Place) -> tuple[tuple[str, str], bool, bool]:
    """Trained alone, then wrapped; but the wrapper leaves one weight out that ranks share."""
    torch.manual_seed(place.rank)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))).double()
    optimizer = GoMuon(model, specs={"1.weight": LayerSpec(ranks="shared")})
    x = torch.randn(8, 4, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GeometryWarning)
        for _ in range(2):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["1.weight"])
    outer = DistributedDataParallel(model)  # makes the other weights equal
    before, state = weights(model), copy.deepcopy(optimizer.state_dict()["state"])
    optimizer.zero_grad()
    outer(x).square().mean().backward()
    told = raised(optimizer.step)
    kept = optimizer.state_dict()["state"]
    same = {n: entries.keys() for n, entries in kept.items()} == {
        n: entries.keys() for n, entries in state.items()
    }
    return told, same, distance(weights(model), before) == 0


def test_an_error_leaves_the_state_of_ranks_that_were_alone(tmp_path: Path) -> None:
    for (name, said), same_state, same_weights in launch(2, wrapped_in_part, tmp_path):
        assert name == RankError.__name__
        assert "is not the same on all ranks" in said
        assert same_state
        assert same_weights
