"""`rebuild_maps=True`: checkpoints without the maps that loading makes again bit for bit."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import state_dict as dsd

from gomuon.optimizer import MatrixOptimizer
from gomuon.recipes.registry import METHODS
from tests.distributed.launcher import Place, launch
from tests.distributed.worlds import assert_alike, distance, weights, wrapped
from tests.distributed.worlds import train as train_on
from tests.methods.table import assert_equal, biased_transformer, make, saved
from tests.models import train
from tests.versions import ONE_PROCESS

LEFT, RIGHT = "left_map", "right_map"
# The maps that are left out, of those that the method has.
CASES: list[tuple[str, dict[str, Any], set[str]]] = [
    ("GoMuon", {}, {LEFT}),
    ("GoMuon", {"input_decay": 0.9}, {LEFT, RIGHT}),
    ("GoMuon", {"input_decay": 0.9, "roots": "products"}, {LEFT, RIGHT}),
    ("GoMuon", {"block_size": 5, "max_side": 16, "long_sides": "diagonal"}, {LEFT}),
    ("GoMuon", {"stagger": True, "max_condition": 100.0}, {LEFT}),
    ("GoMuon", {"alpha": (0.0, 0.25)}, set()),
    ("GoMuon", {"input_decay": 0.9, "state_dtype": "bfloat16"}, set()),
    ("Halfspace", {"alpha": (0.3, 0.5)}, {LEFT}),
    ("KFACMuon", {"refresh_every": 4}, {LEFT, RIGHT}),
    ("MatchedKFAC", {"refresh_every": 4}, {LEFT, RIGHT}),
    ("NewtonMuon", {"refresh_every": 4}, {RIGHT}),
]
EVERY_CASE = pytest.mark.parametrize(
    ("method", "settings", "dropped"), CASES, ids=["-".join((n, *s)) for n, s, _ in CASES]
)


def trained(method: str, settings: dict[str, Any]) -> tuple[nn.Module, MatrixOptimizer]:
    model = biased_transformer(0, torch.float32)
    optimizer = make(method, model, rebuild_maps=True, **settings)
    train(model, optimizer, range(6))
    return model, optimizer


def maps_of(state: Any) -> set[str]:
    return {key for entries in state.values() for key in entries if key.endswith("_map")}


def number_of(optimizer: MatrixOptimizer, name: str) -> int:
    """The number of a parameter in a checkpoint."""
    return [n for group in optimizer.param_groups for n in group["param_names"]].index(name)


def size_of(state_dict: dict[str, Any]) -> int:
    tensors = {
        id(value): value.numel() * value.element_size()
        for entries in state_dict["state"].values()
        for value in entries.values()
        if isinstance(value, torch.Tensor)
    }
    return sum(tensors.values())


def test_every_method_whose_maps_follow_from_kept_factors_has_it() -> None:
    having = {name for name, kind in METHODS.items() if "rebuild_maps" in kind.recipe.settings}
    assert having == {method for method, _, _ in CASES}


@EVERY_CASE
def test_training_goes_on_bit_for_bit(
    method: str, settings: dict[str, Any], dropped: set[str]
) -> None:
    model, optimizer = trained(method, settings)
    every = maps_of(optimizer.state)
    assert every, "there is something to leave out"
    smaller = saved(optimizer.state_dict())
    assert maps_of(smaller["state"]) == every - dropped
    assert maps_of(optimizer.state) == every, "saving leaves the optimizer alone"
    for group in optimizer.param_groups:
        group["rebuild_maps"] = False
    whole = optimizer.state_dict()
    assert maps_of(whole["state"]) == every
    assert (size_of(smaller) < size_of(whole)) == bool(dropped)

    resumed = biased_transformer(9, torch.float32)
    resumed.load_state_dict(model.state_dict())
    # The setting comes with the checkpoint.
    other = make(method, resumed, **settings)
    other.load_state_dict(smaller)
    for p, q in zip(model.parameters(), resumed.parameters(), strict=True):
        mine, theirs = optimizer.state[p], other.state[q]
        assert mine.keys() == theirs.keys()
        for key in maps_of({0: mine}):
            assert torch.equal(mine[key], theirs[key]), key
    train(model, optimizer, range(6, 12))
    train(resumed, other, range(6, 12))
    assert_equal(model, resumed)


def test_layers_that_share_a_factor_share_the_rebuilt_map() -> None:
    model, optimizer = trained("GoMuon", {"input_decay": 0.9})
    other = make("GoMuon", model)
    other.load_state_dict(saved(optimizer.state_dict()))
    q, k = (
        other.state[model.get_parameter(f"trunk.blocks.0.attention.{name}.weight")] for name in "qk"
    )
    assert q["right_factor"] is k["right_factor"]
    assert q[RIGHT] is k[RIGHT]


@pytest.mark.parametrize("change", [{"alpha": 0.3}, {"max_condition": 50.0}])
def test_a_map_of_other_settings_is_saved(change: dict[str, Any]) -> None:
    """It stays in use until the next refresh, and no factor gives it any more."""
    _, optimizer = trained("GoMuon", {"input_decay": 0.9})
    for group in optimizer.param_groups:
        group.update(change)
    assert maps_of(optimizer.state_dict()["state"]) == {LEFT, RIGHT}


def test_a_map_older_than_its_factor_is_saved() -> None:
    """As after a root that could not be taken: the layer keeps the map it had."""
    model, optimizer = trained("GoMuon", {"input_decay": 0.9})
    name = "trunk.blocks.0.mlp.down.weight"
    number, entries = number_of(optimizer, name), optimizer.state[model.get_parameter(name)]
    entries[LEFT] = torch.nextafter(entries[LEFT], torch.full((), 9.0))
    state = optimizer.state_dict()["state"]
    assert maps_of({number: state[number]}) == {LEFT}
    assert maps_of({n: one for n, one in state.items() if n != number}) == set()


def test_without_the_setting_nothing_is_rebuilt() -> None:
    """A layer may have a factor and no map in any checkpoint: its first root failed."""
    model, optimizer = trained("GoMuon", {})
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        group["rebuild_maps"] = False
    other = make("GoMuon", model)
    other.load_state_dict(state)
    assert maps_of(other.state) == {RIGHT}


def test_a_layer_without_a_usable_root_stays_without_a_map() -> None:
    """Its first root failed, so it had the identity; the checkpoint loads, and training goes on."""
    model, optimizer = trained("GoMuon", {"nonfinite": "allow"})
    name = "trunk.blocks.0.mlp.down.weight"
    entries = optimizer.state[model.get_parameter(name)]
    del entries[LEFT]
    entries["left_factor"] = torch.full_like(entries["left_factor"], torch.nan)
    state = saved(optimizer.state_dict())
    assert maps_of({0: state["state"][number_of(optimizer, name)]}) == {RIGHT}
    resumed = copy.deepcopy(model)
    other = make("GoMuon", resumed, nonfinite="allow")
    other.load_state_dict(state)
    assert LEFT not in other.state[resumed.get_parameter(name)]
    assert LEFT in other.state[resumed.get_parameter("trunk.blocks.0.mlp.up.weight")]
    optimizer._step.participants.clear()  # a map was taken out of its state
    train(model, optimizer, range(6, 8))
    train(resumed, other, range(6, 8))
    assert_equal(model, resumed)


# ---- torch.distributed.checkpoint ----------------------------------------------------------------


def states(model: nn.Module, optimizer: MatrixOptimizer) -> dict[str, Any]:
    return {
        "model": dsd.get_model_state_dict(model),
        "optimizer": dsd.get_optimizer_state_dict(model, optimizer),
    }


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@EVERY_CASE
def test_a_directory_is_loaded_through_a_new_optimizers_state(
    method: str, settings: dict[str, Any], dropped: set[str], tmp_path: Path
) -> None:
    """It reads what the new optimizer's state has, which is blank."""
    model, optimizer = trained(method, settings)
    dcp.save(states(model, optimizer), checkpoint_id=tmp_path, **ONE_PROCESS)
    train(model, optimizer, range(6, 12))
    resumed = biased_transformer(9, torch.float32)
    other = make(method, resumed, rebuild_maps=True, **settings)
    loaded = states(resumed, other)
    assert maps_of(loaded["optimizer"]["state"]) == maps_of(optimizer.state) - dropped
    dcp.load(loaded, checkpoint_id=tmp_path, **ONE_PROCESS)
    dsd.set_model_state_dict(resumed, loaded["model"])
    dsd.set_optimizer_state_dict(resumed, other, loaded["optimizer"])
    train(resumed, other, range(6, 12))
    assert_equal(model, resumed)


# ---- several ranks -------------------------------------------------------------------------------


def resumed_on_ranks(place: Place) -> tuple[Any, Any, set[str], bool]:
    """Weights with and without an interruption, the maps in the whole state, and if it has all."""
    found: list[Any] = []
    kept: set[str] = set()
    for interrupted in (False, True):
        model = wrapped(biased_transformer(0, torch.float64), "fsdp")
        optimizer = make("GoMuon", model, rebuild_maps=True, input_decay=0.9)
        train_on(model, optimizer, range(6), place)
        if interrupted:
            whole = optimizer.consolidated_state_dict()
            kept = maps_of(whole["state"])
            optimizer = make("GoMuon", model)
            optimizer.load_state_dict(saved(whole))
        train_on(model, optimizer, range(6, 12), place)
        found.append(weights(model))
    complete = all(
        len(maps_of({0: entries})) == 2 for entries in optimizer.state.values() if LEFT in entries
    )
    return found[0], found[1], kept, complete


def test_ranks_go_on_from_a_whole_state_without_maps(tmp_path: Path) -> None:
    answers = launch(2, resumed_on_ranks, tmp_path)
    for straight, resumed, kept, complete in answers:
        assert kept == set()
        assert complete
        assert distance(straight, resumed) == 0.0
    assert_alike([answer[1] for answer in answers])
