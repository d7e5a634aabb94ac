"""What no training writes is refused with a ValueError, and the optimizer stays as it was.

The campaign `tests.faults.checkpoints` makes such checkpoints at random; here each has its message.
"""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gomuon.optimizer import MatrixOptimizer
from tests.faults.checkpoints import same
from tests.methods.table import make, saved
from tests.models import mlp

Damage = Callable[[dict[str, Any]], None]

CLOCKS: dict[str, dict[str, Any]] = {
    "NewtonMuon": {"refresh_every": 4},  # its first refresh is the last of them
    "GoMuon": {"input_decay": 0.9},
    "KFAC": {"statistics_every": 1, "refresh_every": 2},
    "Shampoo": {"refresh_every": 2, "graft": "rmsprop"},
    "SOAP": {"refresh_every": 2},
    "Mousse": {"refresh_every": 2},
}


def learn(model: nn.Module, optimizer: MatrixOptimizer, steps: range) -> None:
    for step in steps:
        x = torch.randn(7, 4, generator=torch.Generator().manual_seed(step)).double()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def trained(method: str, **settings: Any) -> tuple[nn.Module, MatrixOptimizer]:
    model = mlp(4, 5, 5, 3)
    optimizer = make(method, model, **CLOCKS.get(method, {}), **settings)
    learn(model, optimizer, range(4))
    return model, optimizer


def assert_refused(method: str, checkpoint: Any, message: str) -> None:
    """And what was captured for the coming step is kept as well."""
    model, optimizer = trained(method)
    twin, other = copy.deepcopy((model, optimizer))
    for one, its in ((model, optimizer), (twin, other)):
        its.zero_grad()
        one(torch.ones(3, 4).double().cumsum(0)).square().mean().backward()
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=re.escape(message)) as refusal:
        optimizer.load_state_dict(checkpoint)
    assert refusal.value.__cause__ is None, "it was foreseen"
    assert same(optimizer.state_dict(), before)
    optimizer.step()
    other.step()
    learn(model, optimizer, range(9, 14))
    learn(twin, other, range(9, 14))
    assert same(model.state_dict(), twin.state_dict())


# ---- structure -----------------------------------------------------------------------------------


@pytest.mark.parametrize("thing", [None, 3, "state", [1], (), torch.zeros(2)])
def test_what_is_no_mapping_is_refused(thing: Any) -> None:
    assert_refused("GoMuon", thing, "a checkpoint is what state_dict() returns")


def put(value: Any, *path: Any) -> Damage:
    def damage(checkpoint: dict[str, Any]) -> None:
        holder: Any = checkpoint
        for key in path[:-1]:
            holder = holder[key]
        holder[path[-1]] = value(holder[path[-1]]) if callable(value) else value

    return damage


def drop(*path: Any) -> Damage:
    def damage(checkpoint: dict[str, Any]) -> None:
        holder: Any = checkpoint
        for key in path[:-1]:
            holder = holder[key]
        del holder[path[-1]]

    return damage


FIRST = ("param_groups", 0)
STRUCTURE: list[tuple[Damage, str]] = [
    (drop("state"), "'state' of the checkpoint must be a dict, got None"),
    (put([], "state"), "'state' of the checkpoint must be a dict, got []"),
    (put(3, "state", 0), "the state of parameter 0 must be a dict"),
    (put({}, "state", 77), "a state for parameter 77, which is in none of its groups"),
    (drop("param_groups"), "'param_groups' of the checkpoint must be a list, got None"),
    (put({}, "param_groups"), "'param_groups' of the checkpoint must be a list, got {}"),
    (put(None, *FIRST), "group 0 of the checkpoint must be a dict"),
    (put(3, *FIRST, 7), "group 0 of the checkpoint must be a dict with names as keys"),
    (drop(*FIRST, "params"), "must have a list 'params' of numbers or names, got None"),
    (put(7, *FIRST, "params"), "must have a list 'params' of numbers or names, got 7"),
    (put([[0], 1], *FIRST, "params"), "must have a list 'params'"),
    (put([0, 0], *FIRST, "params"), "group 0 of the checkpoint has a parameter twice"),
    (put([0, 2], *FIRST, "params"), "the checkpoint has parameter 2 in two groups"),
    (put("ab", *FIRST, "param_names"), "'param_names' of group 0 of the checkpoint must be"),
    (put([1, 2], *FIRST, "param_names"), "'param_names' of group 0 of the checkpoint must be"),
    (put(["a"], *FIRST, "param_names"), "has 2 parameters and 1 names"),
    (put("1", "format"), "this checkpoint has format '1'"),
    (put(True, "format"), "this checkpoint has format True"),
    (put(["GoMuon"], "method"), "a checkpoint of ['GoMuon'], but the optimizer is GoMuon"),
]


@pytest.mark.parametrize(("damage", "message"), STRUCTURE, ids=[m for _, m in STRUCTURE])
def test_a_wrong_structure_is_refused(damage: Damage, message: str) -> None:
    checkpoint = saved(trained("GoMuon")[1].state_dict())
    checkpoint["param_groups"][0] = dict(checkpoint["param_groups"][0])
    damage(checkpoint)
    assert_refused("GoMuon", checkpoint, message)


# ---- settings ------------------------------------------------------------------------------------

SETTINGS: list[tuple[str, Any]] = [
    ("alpha", 7), ("alpha", (0.1, 0.9)), ("momentum", -3), ("momentum", float("nan")),
    ("lr", -1), ("lr", float("inf")), ("lr", 10**400), ("lr", None), ("lr", torch.zeros(2)),
    ("lr", torch.zeros((), device="meta")), ("polar", "svdd"), ("polar", torch.zeros(2)),
    ("shrinkage", 5), ("shrinkage", {"ridge": 1}), ("treatment", "matrx"), ("refresh_every", 0),
    ("refresh_every", 10**30), ("refresh_every", torch.tensor(2.5)), ("token_skip", 0.0),
    ("nesterov", 1), ("nonfinite", "ignore"), ("work", []), ("loss_reduction", None),
    ("tensor_parallel", None),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), SETTINGS, ids=[f"{n} {v}" for n, v in SETTINGS])
@pytest.mark.parametrize("group", [0, 1])
def test_impossible_settings_are_refused(name: str, value: Any, group: int) -> None:
    checkpoint = saved(trained("GoMuon")[1].state_dict())
    checkpoint["param_groups"][group][name] = value
    assert_refused("GoMuon", checkpoint, f"group {group} of the checkpoint: {name} must be")


def test_a_methods_own_ranges_count() -> None:
    checkpoint = saved(trained("Mousse")[1].state_dict())
    checkpoint["param_groups"][0]["alpha"] = (0.1, 0.2)  # a pair is Go-MUON's
    assert_refused("Mousse", checkpoint, "alpha must be a number in [0, 0.5]")


@pytest.mark.parametrize(
    ("adamw", "message"),
    [
        (3e-3, "adamw must be a dict"),
        ({"lr": "fast"}, "adamw's lr must be"),
        ({"betas": (0.9, 1.0)}, "adamw's betas must be"),
        ({"amsgrad": True}, "but no 'amsgrad'"),
    ],
)
def test_impossible_settings_of_adamw_are_refused(adamw: Any, message: str) -> None:
    checkpoint = saved(trained("GoMuon")[1].state_dict())
    checkpoint["param_groups"][1]["adamw"] = adamw
    assert_refused("GoMuon", checkpoint, message)


@pytest.mark.parametrize("name", ["step", "skipped"])
@pytest.mark.parametrize("value", [-1, 1.5, 3.0, True, None, "3", torch.tensor(3), 10**30])
def test_a_group_counts_in_whole_numbers(name: str, value: Any) -> None:
    checkpoint = saved(trained("GoMuon")[1].state_dict())
    checkpoint["param_groups"][0][name] = value
    assert_refused("GoMuon", checkpoint, f"{name} of group 0 of the checkpoint must be a whole")


def test_another_treatment_is_refused() -> None:
    checkpoint = saved(trained("GoMuon")[1].state_dict())
    checkpoint["param_groups"][0]["treatment"] = "adamw"
    assert_refused(
        "GoMuon", checkpoint, "'0.weight' is an AdamW parameter in the checkpoint and a matrix here"
    )


def test_what_else_a_group_may_carry_is_loaded() -> None:
    _, optimizer = trained("GoMuon")
    checkpoint = saved(optimizer.state_dict())
    extras = {
        "initial_lr": 0.1,
        "foreach": None,
        "maximize": False,
        "mine": {"a": [1]},
        "scale": "x",
    }
    for group in checkpoint["param_groups"]:
        group.update(extras, alpha=[0.25, 0.25], momentum=torch.tensor(0.5), lr=torch.tensor([0.1]))
        group["adamw"] = {"eps": 1e-9}
    model, other = trained("GoMuon")
    other.load_state_dict(checkpoint)
    for group in other.param_groups:
        assert group.items() >= extras.items()
        assert group["momentum"] == 0.5
        assert group["lr"].shape == ()
        assert group["adamw"] == {
            "lr": 3e-3,
            "betas": (0.9, 0.95),
            "eps": 1e-9,
            "weight_decay": 0.0,
        }
    learn(model, other, range(4, 8))


# ---- what nobody foresaw -------------------------------------------------------------------------


class Odd(dict[str, Any]):
    """A mapping that fails half-way."""

    def items(self) -> Any:
        raise OSError("the disk is gone")


def test_an_unforeseen_error_is_a_value_error_too() -> None:
    _, optimizer = trained("GoMuon")
    before = copy.deepcopy(optimizer.state_dict())
    checkpoint = saved(optimizer.state_dict())
    checkpoint["state"] = Odd(checkpoint["state"])
    with pytest.raises(
        ValueError, match="the optimizer was not changed: OSError: the disk"
    ) as refusal:
        optimizer.load_state_dict(checkpoint)
    assert isinstance(refusal.value.__cause__, OSError)
    assert same(optimizer.state_dict(), before)


@pytest.mark.parametrize("place", ["restored", "_divide_state", "_gate", "post hook"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failure_half_way_is_undone(
    place: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = trained("GoMuon")
    twin, other = copy.deepcopy((model, optimizer))
    source, donor = trained("GoMuon")
    learn(source, donor, range(4, 7))
    before = copy.deepcopy(optimizer.state_dict())
    calls = []

    def fail(*_: Any) -> None:
        calls.append(place)
        if len(calls) == 1:
            raise error("out of memory")

    with monkeypatch.context() as patch:
        if place == "restored":
            patch.setattr("gomuon.checkpoints.store.Store.restored", fail)
        elif place == "post hook":
            optimizer.register_load_state_dict_post_hook(fail)
        else:
            patch.setattr(optimizer, place, fail)
        with pytest.raises(ValueError if error is RuntimeError else error, match="out of memory"):
            optimizer.load_state_dict(donor.state_dict())
    assert calls
    assert same(optimizer.state_dict(), before)
    optimizer._gate()  # where it was the one that failed
    learn(model, optimizer, range(10, 14))
    learn(twin, other, range(10, 14))
    assert same(model.state_dict(), twin.state_dict())


def test_a_warning_made_an_error_stays_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    _, optimizer = trained("GoMuon")

    def warn(team: object) -> None:
        raise UserWarning("one rank's part")

    monkeypatch.setattr(optimizer, "_divide_state", warn)
    with pytest.raises(UserWarning, match="one rank's part"):
        optimizer.load_state_dict(optimizer.state_dict())
