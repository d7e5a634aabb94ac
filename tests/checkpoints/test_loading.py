"""Checkpoints of another order, another model, another method, another format.

The same model in the same order: see `test_state` and `test_distributed_checkpoints`.
"""

import copy
import re
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dsd

import gomuon
from gomuon.checkpoints import store
from gomuon.optimizer import MatrixOptimizer
from tests.methods.table import make, saved
from tests.models import mlp


def assert_same(one: nn.Module, other: nn.Module) -> None:
    """To the rounding of K-FAC's sum over layers, which another order changes."""
    others = dict(other.named_parameters())
    for name, p in one.named_parameters():
        torch.testing.assert_close(p, others[name], rtol=1e-12, atol=0, msg=name)


def assert_unchanged(optimizer: MatrixOptimizer, before: dict[str, Any]) -> None:
    after = optimizer.state_dict()
    assert after.keys() == before.keys()
    assert after["param_groups"] == before["param_groups"]
    assert after["state"].keys() == before["state"].keys()
    for index, entries in before["state"].items():
        for key, value in entries.items():
            found = after["state"][index][key]
            assert torch.equal(found, value) if isinstance(value, Tensor) else found == value, key


# ---- by name ------------------------------------------------------------------------------------


class Pair(nn.Module):
    """Two hidden layers of one shape, whose places in the model may be exchanged."""

    def __init__(self, order: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = {name: nn.Linear(6, 6).double() for name in "abh"}
        for name in order:
            self.add_module(name, layers[name])

    def forward(self, x: Tensor) -> Tensor:
        for name in "abh":
            x = torch.tanh(self.get_submodule(name)(x))
        return x


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        x = torch.randn(16, 6, generator=torch.Generator().manual_seed(step)).double()
        optimizer.zero_grad()
        (model(x) - x.flip(1)).square().mean().backward()
        optimizer.step()


def by_file(source: tuple[nn.Module, Any], target: tuple[nn.Module, Any]) -> None:
    target[1].load_state_dict(saved(source[1].state_dict()))


def by_dcp(flat: bool) -> Callable[[tuple[nn.Module, Any], tuple[nn.Module, Any]], None]:
    options = dsd.StateDictOptions(flatten_optimizer_state_dict=flat)

    def carry(source: tuple[nn.Module, Any], target: tuple[nn.Module, Any]) -> None:
        state = saved(dsd.get_optimizer_state_dict(*source, options=options))
        dsd.set_optimizer_state_dict(*target, state, options=options)

    return carry


@pytest.mark.parametrize("carry", [by_file, by_dcp(False), by_dcp(True)])
@pytest.mark.parametrize("method", ["GoMuon", "KFAC", "SOAP"])
def test_another_order_of_the_same_names(method: str, carry: Any) -> None:
    model, other = Pair("abh"), Pair("bah")
    optimizer, loaded = make(method, model), make(method, other)
    learn(model, optimizer, range(6))
    other.load_state_dict(model.state_dict())
    names = [list(group["param_names"]) for group in loaded.param_groups]
    carry((model, optimizer), (other, loaded))
    assert [group["param_names"] for group in loaded.param_groups] == names
    learn(model, optimizer, range(6, 12))
    learn(other, loaded, range(6, 12))
    assert_same(model, other)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "_orig_mod.module."])
def test_names_of_a_wrapped_model(prefix: str) -> None:
    model, other = Pair("abh"), Pair("bah")
    optimizer, loaded = make("GoMuon", model), make("GoMuon", other)
    learn(model, optimizer, range(3))
    state = saved(optimizer.state_dict())
    for group in state["param_groups"]:
        group["param_names"] = [prefix + name for name in group["param_names"]]
    other.load_state_dict(model.state_dict())
    loaded.load_state_dict(state)
    learn(model, optimizer, range(3, 8))
    learn(other, loaded, range(3, 8))
    assert_same(model, other)


@pytest.mark.parametrize("nameless", ["checkpoint", "optimizer"])
def test_without_names_on_one_side_torch_matches_by_position(nameless: str) -> None:
    def matrices(model: nn.Module, named: bool) -> MatrixOptimizer:
        pairs = [(name, p) for name, p in model.named_parameters() if p.ndim == 2]
        return gomuon.Muon(pairs if named else [p for _, p in pairs])

    model, other = Pair("abh"), Pair("abh")
    optimizer = matrices(model, nameless != "checkpoint")
    loaded = matrices(other, nameless != "optimizer")
    learn(model, optimizer, range(3))
    loaded.load_state_dict(saved(optimizer.state_dict()))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        if p.ndim == 2:
            assert torch.equal(optimizer.state[p]["momentum"], loaded.state[q]["momentum"])


# ---- what does not fit --------------------------------------------------------------------------


def trained(method: str, model: nn.Module) -> MatrixOptimizer:
    optimizer = make(method, model)
    inputs = next(model.parameters()).shape[1]
    model(torch.randn(7, inputs, dtype=torch.float64)).square().mean().backward()
    optimizer.step()
    return optimizer


def renamed(**names: str) -> nn.Module:
    layers = mlp(4, 5, 5, 3)
    return nn.Sequential(
        OrderedDict((names.get(f"_{name}", name), m) for name, m in layers.named_children())
    )


@pytest.mark.parametrize(
    ("method", "other", "message"),
    [
        ("GoMuon", lambda: mlp(4, 6, 6, 3), "momentum of '0.weight' has shape (6, 4)"),
        ("GoMuon", lambda: mlp(4, 5, 5, 5, 3), "4.weight' is only in the checkpoint"),
        ("GoMuon", lambda: mlp(4, 5, 3), "2.weight' is only in the optimizer"),
        (
            "GoMuon",
            lambda: renamed(_2="middle"),
            "'middle.weight' is only in the checkpoint, '2.weight' is only in the optimizer",
        ),
        ("SOAP", lambda: mlp(4, 5, 5, 3), "a checkpoint of SOAP, but the optimizer is GoMuon"),
        ("Muon", lambda: mlp(4, 5, 5, 3), "a checkpoint of Muon, but the optimizer is GoMuon"),
    ],
)
def test_what_does_not_fit_is_named_and_changes_nothing(
    method: str, other: Callable[[], nn.Module], message: str
) -> None:
    optimizer = trained("GoMuon", mlp(4, 5, 5, 3))
    state = trained(method, other()).state_dict()
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=re.escape(message)):
        optimizer.load_state_dict(state)
    assert_unchanged(optimizer, before)


def test_another_method_shows_even_without_its_name() -> None:
    """torch.distributed.checkpoint carries state and groups only."""
    model, other = mlp(4, 5, 5, 3), mlp(4, 5, 5, 3)
    state = dsd.get_optimizer_state_dict(model, trained("GoMuon", model))
    optimizer = trained("SOAP", other)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="of another method: SOAP has no setting 'momentum'"):
        dsd.set_optimizer_state_dict(other, optimizer, state)
    assert_unchanged(optimizer, before)


# ---- formats ------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["format", "method"])
def test_a_checkpoint_without_the_extras_is_of_format_1(missing: str) -> None:
    model = mlp(4, 5, 5, 3)
    optimizer = trained("GoMuon", model)
    state = optimizer.state_dict()
    before = copy.deepcopy(state)
    optimizer.load_state_dict({key: value for key, value in state.items() if key != missing})
    assert_unchanged(optimizer, before)


@pytest.mark.parametrize("numbered", [True, False])
def test_older_formats_are_migrated_step_by_step(
    numbered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = trained("GoMuon", mlp(4, 5, 5, 3))
    before = copy.deepcopy(optimizer.state_dict())
    old = copy.deepcopy(before)
    for entries in old["state"].values():
        if "momentum" in entries:
            entries["velocity"] = entries.pop("momentum")
    if not numbered:
        del old["format"]

    def rename(old_key: str, new_key: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
        def migrate(checkpoint: dict[str, Any]) -> dict[str, Any]:
            state = {
                index: {new_key if key == old_key else key: v for key, v in entries.items()}
                for index, entries in checkpoint["state"].items()
            }
            return {**checkpoint, "state": state}

        return migrate

    monkeypatch.setattr(store, "FORMAT", 3)
    monkeypatch.setitem(store.MIGRATIONS, 1, rename("velocity", "speed"))
    monkeypatch.setitem(store.MIGRATIONS, 2, rename("speed", "momentum"))
    optimizer.load_state_dict(old)
    assert_unchanged(optimizer, before)
    assert any("velocity" in entries for entries in old["state"].values()), "the caller's is kept"


def test_every_older_format_has_a_migration() -> None:
    assert set(store.MIGRATIONS) == set(range(1, store.FORMAT))


# ---- devices ------------------------------------------------------------------------------------


def test_state_follows_its_parameter_to_another_device() -> None:
    """The placement alone: the device that every machine has beside the CPU holds no numbers."""
    optimizer = trained("GoMuon", mlp(4, 5, 5, 3))
    with torch.device("meta"), warnings.catch_warnings():
        other = make("GoMuon", mlp(4, 5, 5, 3))
    other.load_state_dict(saved(optimizer.state_dict()))
    for entries in other.state.values():
        for key, value in entries.items():
            if isinstance(value, Tensor):
                assert value.device.type == ("cpu" if key == "step" else "meta"), key
