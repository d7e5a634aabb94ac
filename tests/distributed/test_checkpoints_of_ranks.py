"""Saved on n ranks, loaded on m, and training goes on as if nothing had been."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import state_dict as dsd
from torch.distributed.tensor import DTensor

from gomuon import KFAC, GoMuon
from gomuon.distributed.divided_state import is_only_count
from gomuon.distributed.owned import OwnedLayer
from gomuon.errors import GeometryWarning
from gomuon.optimizer import MatrixOptimizer
from tests.distributed.launcher import Place, launch
from tests.distributed.worlds import Weights, assert_alike, distance, train, weights, wrapped
from tests.methods.table import biased_transformer
from tests.models import transformer
from tests.versions import ONE_PROCESS

BEFORE, AFTER = range(6), range(6, 12)
# In turns on any number of ranks: "auto" would stop taking turns on one.
METHODS: dict[str, tuple[type[MatrixOptimizer], dict[str, Any]]] = {
    "GoMuon": (GoMuon, {"stagger": True}),
    "int8": (GoMuon, {"state_dtype": "int8", "stagger": True}),
    "KFAC": (KFAC, {"statistics_every": 3, "refresh_every": 4, "stagger": True}),
}


def made(kind: str, seed: int, method: str) -> tuple[nn.Module, MatrixOptimizer]:
    model = wrapped(biased_transformer(seed, torch.float64), kind)
    optimizer, settings = METHODS[method]
    return model, optimizer(model, **settings)


def states(model: nn.Module, optimizer: MatrixOptimizer) -> dict[str, Any]:
    return {
        "model": dsd.get_model_state_dict(model),
        "optimizer": dsd.get_optimizer_state_dict(model, optimizer),
    }


def load(model: nn.Module, optimizer: MatrixOptimizer, folder: Path, **options: Any) -> None:
    loaded = states(model, optimizer)
    dcp.load(loaded, checkpoint_id=folder, **options)
    dsd.set_model_state_dict(model, loaded["model"])
    dsd.set_optimizer_state_dict(model, optimizer, loaded["optimizer"])


def go_on(place: Place, kind: str, method: str, source: str, target: str) -> Weights:
    """Load, train, and save for the next; without a source train from the beginning."""
    model, optimizer = made(kind, 9 if source else 0, method)
    if source:
        load(model, optimizer, Path(source))
    train(model, optimizer, AFTER if source else BEFORE, place)
    if target:
        dcp.save(states(model, optimizer), checkpoint_id=target)
    return weights(model)


def uninterrupted(method: str, steps: range) -> Weights:
    model, optimizer = made("alone", 0, method)
    train(model, optimizer, steps)
    return weights(model)


@pytest.mark.parametrize(
    ("method", "saved", "loaded"),
    [
        ("GoMuon", (2, "ddp"), (4, "fsdp")),
        ("GoMuon", (4, "hybrid"), (2, "ddp")),
        ("GoMuon", (1, "ddp"), (2, "fsdp")),
        ("KFAC", (2, "fsdp"), (2, "ddp")),
        ("KFAC", (2, "ddp"), (1, "ddp")),
    ],
)
def test_a_directory_saved_on_n_ranks_is_loaded_on_m(
    method: str, saved: tuple[int, str], loaded: tuple[int, str], tmp_path: Path
) -> None:
    (n, wrapper), (m, other) = saved, loaded
    folder = str(tmp_path / "checkpoint")
    launch(n, go_on, tmp_path, kind=wrapper, method=method, source="", target=folder)
    answers = launch(m, go_on, tmp_path, kind=other, method=method, source=folder, target="")
    assert_alike(answers)
    assert distance(answers[0], uninterrupted(method, range(12))) < 1e-9


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_to_a_single_process_and_back(kind: str, tmp_path: Path) -> None:
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    launch(2, go_on, tmp_path, kind=kind, method="GoMuon", source="", target=one)
    model, optimizer = made("alone", 9, "GoMuon")
    load(model, optimizer, Path(one), **ONE_PROCESS)
    dcp.save(states(model, optimizer), checkpoint_id=two, **ONE_PROCESS)
    train(model, optimizer, AFTER)
    expected = uninterrupted("GoMuon", range(12))
    assert distance(weights(model), expected) < 1e-9
    answers = launch(2, go_on, tmp_path, kind=kind, method="GoMuon", source=two, target="")
    assert distance(answers[0], expected) < 1e-9


# ---- whole states, without torch.distributed.checkpoint ------------------------------------------


def consolidate(place: Place, kind: str, method: str) -> tuple[Any, Any, dict[str, int]]:
    model, optimizer = made(kind, 0, method)
    train(model, optimizer, BEFORE, place)
    return optimizer.consolidated_state_dict(), weights(model), optimizer.owners()


def resume(place: Place, kind: str, method: str, state: Any, start: Any) -> Weights:
    bare = biased_transformer(9, torch.float64)
    bare.load_state_dict(start)
    model = wrapped(bare, kind)
    optimizer_class, settings = METHODS[method]
    optimizer = optimizer_class(model, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error", GeometryWarning)
        optimizer.load_state_dict(state)
    train(model, optimizer, AFTER, place)
    return weights(model)


@pytest.mark.parametrize(("kind", "other"), [("ddp", "fsdp"), ("fsdp", "ddp")])
@pytest.mark.parametrize("method", ["GoMuon", "int8", "KFAC"])
def test_a_consolidated_state_is_a_single_processs(
    method: str, kind: str, other: str, tmp_path: Path
) -> None:
    answers = launch(2, consolidate, tmp_path, kind=kind, method=method)
    (state, start, owners), (twin, _, _) = answers
    assert set(owners.values()) == {0, 1}
    model, optimizer = made("alone", 0, method)
    train(model, optimizer, BEFORE)
    alone = optimizer.state_dict()
    assert alone["param_groups"] == state["param_groups"]
    for number, entries in alone["state"].items():
        for whole in (state, twin):
            assert entries.keys() == whole["state"][number].keys()
        for key, value in entries.items():
            if key.endswith("_basis"):  # eigenvectors of nearly equal eigenvalues are not unique
                assert state["state"][number][key].shape == value.shape
                continue
            torch.testing.assert_close(
                state["state"][number][key], value, rtol=1e-7, atol=1e-9, msg=f"{number} {key}"
            )
    answers = launch(2, resume, tmp_path, kind=other, method=method, state=state, start=start)
    assert distance(answers[0], uninterrupted(method, range(12))) < 1e-9


def part(place: Place, kind: str) -> tuple[Any, int, int]:
    """One rank's own state, and what it holds of matrices."""
    model, optimizer = made(kind, 0, "GoMuon")
    train(model, optimizer, BEFORE, place)
    owned = sum(owner == place.rank for owner in optimizer.owners().values())
    held = sum("momentum" in entries for entries in optimizer.state.values())
    assert held == owned
    for layer in (
        x for roll in optimizer._step.participants.values() for s in roll.stacks for x in s.layers
    ):
        assert isinstance(layer, OwnedLayer)  # and nothing whole outlives the step
        assert [*layer.whole_gradients, *layer.whole_weights, *layer.steps] == []
    averages = [entries["exp_avg"] for entries in optimizer.state.values() if "exp_avg" in entries]
    assert averages
    assert all(isinstance(average, DTensor) == (kind == "fsdp") for average in averages)
    return optimizer.state_dict() if kind == "ddp" else None, held, len(optimizer.owners())


def test_each_rank_holds_its_own_matrices_only_and_one_ranks_part_is_told_of(
    tmp_path: Path,
) -> None:
    for kind in ("fsdp", "ddp"):
        answers = launch(2, part, tmp_path, kind=kind)
        assert sum(held for _, held, _ in answers) == answers[0][2]
        assert all(held for _, held, _ in answers)
    _, optimizer = made("alone", 0, "GoMuon")
    with pytest.warns(GeometryWarning, match="the part of one rank"):
        optimizer.load_state_dict(answers[0][0])


def gathered(place: Place, kind: str, to: int) -> tuple[Any, Any, dict[str, Any]]:
    """What one rank alone saves after all ranks have gathered, and what each is told."""
    group = torch.distributed.new_group([1, 0])  # a group of its own, as under DDP
    model = wrapped(biased_transformer(0, torch.float64), kind)
    optimizer = GoMuon(model, process_group=group)
    train(model, optimizer, BEFORE, place)
    whole = optimizer.consolidated_state_dict()
    found: dict[str, Any] = {}

    def told(act: Callable[[], Any]) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found["last"] = act()
        return [str(w.message) for w in caught if w.category is GeometryWarning]

    found["torch's way"] = told(lambda: dsd.get_optimizer_state_dict(model, optimizer))
    optimizer.consolidate_state_dict(to)
    optimizer.param_groups[0]["lr"] *= 0.5  # a scheduler comes after the step, and before saving
    found["gathered"] = told(optimizer.state_dict) if place.rank == to else []  # nobody else asks
    saved = found["last"] if place.rank == to else None
    if saved is not None:
        assert saved["param_groups"][0]["lr"] == optimizer.param_groups[0]["lr"]
    found["others"] = told(optimizer.state_dict)
    train(model, optimizer, range(6, 7), place)
    found["after a step"] = told(optimizer.state_dict)
    found["twice"] = told(optimizer.state_dict)
    found["part"] = any(map(is_only_count, found.pop("last")["state"].values()))
    with pytest.raises(ValueError, match=r"a rank from 0 to 1, got 2"):
        optimizer.consolidate_state_dict(2)
    return whole, saved, found


@pytest.mark.parametrize(("kind", "to"), [("ddp", 0), ("ddp", 1), ("fsdp", 0)])
def test_one_rank_saves_what_all_have_gathered(kind: str, to: int, tmp_path: Path) -> None:
    answers = launch(2, gathered, tmp_path, kind=kind, to=to)
    for rank, (whole, saved, found) in enumerate(answers):
        assert found.pop("part")
        (once,) = found.pop("after a step")
        assert "only this rank's part" in once
        assert "consolidate_state_dict()" in once
        assert not any(found.values()), found
        assert (saved is not None) == (rank == to)
        if saved is not None:
            torch.testing.assert_close(saved["state"], whole["state"], rtol=0, atol=0)


def other_settings(place: Place, source: str) -> tuple[Weights, int]:
    """The checkpoint's interval takes the constructor's place; no state changes hands."""
    model = wrapped(biased_transformer(9, torch.float64), "fsdp")
    optimizer = GoMuon(model, refresh_every=100)
    before = optimizer.owners()
    with warnings.catch_warnings():
        warnings.simplefilter("error", GeometryWarning)
        load(model, optimizer, Path(source))
    assert optimizer.owners() == before
    train(model, optimizer, AFTER, place)
    return weights(model), optimizer.param_groups[0]["refresh_every"]


def test_an_optimizer_made_with_other_settings_takes_the_checkpoints(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    launch(2, go_on, tmp_path, kind="ddp", method="GoMuon", source="", target=folder)
    answers = launch(4, other_settings, tmp_path, source=folder)
    for trained, interval in answers:
        assert interval == 4
        assert distance(trained, uninterrupted("GoMuon", range(12))) < 1e-9


def ask_first(place: Place, kind: str) -> tuple[Weights, list[int]]:
    """Asked for its state before it has one, an optimizer is as new."""
    model = wrapped(transformer(layers=1), kind)
    optimizer = GoMuon(model)
    blank: Any = dsd.get_optimizer_state_dict(model, optimizer)
    held = [name for name, entries in blank["state"].items() if "momentum" in entries]
    train(model, optimizer, BEFORE, place)
    return weights(model), [optimizer.owners()[name] for name in held]


def test_a_blank_state_is_made_by_owners_and_never_trained_on(tmp_path: Path) -> None:
    for kind in ("ddp", "fsdp"):
        answers = launch(2, ask_first, tmp_path, kind=kind)
        model = transformer(layers=1)
        train(model, GoMuon(model, stagger=True), BEFORE)
        for rank, (trained, owners) in enumerate(answers):
            assert distance(trained, weights(model)) < 1e-9
            assert set(owners) == {rank}
