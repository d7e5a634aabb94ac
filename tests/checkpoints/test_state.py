"""Saving, loading, copying: training goes on as if nothing had happened."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gomuon import GeometryWarning, GoMuon, Halfspace, LayerSpec, Muon, MuonQK
from gomuon.optimizer import MatrixOptimizer
from tests.methods.table import saved
from tests.models import mlp, train, transformer

METHODS: list[Callable[[nn.Module], MatrixOptimizer]] = [GoMuon, Muon, MuonQK, Halfspace]


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for (name, p), q in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_state_is_float32_or_wider_and_stays_so(dtype: torch.dtype) -> None:
    model = transformer(dtype=torch.float32, layers=1).to(dtype)
    optimizer = GoMuon(model)
    optimizer.param_groups[0]["lr"] = 0.0
    if dtype != torch.float16:  # float16 attention is not trained on the CPU
        train(model, optimizer, range(1))
    else:
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        with pytest.warns(GeometryWarning, match="nothing was captured"):
            optimizer.param_groups[0]["lr"] = 0.1
            optimizer.step()
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    before = copy.deepcopy(optimizer.state_dict()["state"])
    optimizer.load_state_dict(saved(optimizer.state_dict()))
    tensors = 0
    for index, entries in optimizer.state_dict()["state"].items():
        for key, value in entries.items():
            if isinstance(value, Tensor) and key != "step":
                tensors += 1
                assert value.dtype == expected, key
                assert torch.equal(value, before[index][key]), key
    assert tensors >= 14


def test_loading_does_not_tie_two_optimizers_together() -> None:
    one, other = transformer(layers=1), transformer(layers=1)
    first, second = GoMuon(one), GoMuon(other)
    train(one, first, range(3))
    second.load_state_dict(first.state_dict())
    momentum = first.state[one.get_parameter("trunk.blocks.0.mlp.up.weight")]["momentum"].clone()
    train(other, second, range(3, 6))
    name = "trunk.blocks.0.mlp.up.weight"
    assert torch.equal(first.state[one.get_parameter(name)]["momentum"], momentum)


def test_factors_shared_when_saved_are_shared_when_loaded() -> None:
    model = transformer(layers=1)
    optimizer = GoMuon(model, input_decay=0.9)
    train(model, optimizer, range(1))
    optimizer.load_state_dict(saved(optimizer.state_dict()))
    q, k, o = (
        optimizer.state[model.get_parameter(f"trunk.blocks.0.attention.{name}.weight")][
            "right_factor"
        ]
        for name in "qko"
    )
    assert q.data_ptr() == k.data_ptr()
    assert q.data_ptr() != o.data_ptr()


@pytest.mark.parametrize("order", ["model first", "optimizer first"])
@pytest.mark.parametrize("method", METHODS)
def test_deepcopy_of_model_and_optimizer_trains_on(
    method: Callable[[nn.Module], MatrixOptimizer], order: str
) -> None:
    model = transformer(layers=1)
    optimizer = method(model)
    train(model, optimizer, range(6))
    if order == "model first":
        twin, twin_optimizer = copy.deepcopy((model, optimizer))
    else:
        twin_optimizer, twin = copy.deepcopy((optimizer, model))
    train(model, optimizer, range(6, 12))
    train(twin, twin_optimizer, range(6, 12))
    assert_same(model, twin)
    assert str(twin_optimizer.routing_table()) == str(optimizer.routing_table())


def test_a_copied_model_carries_no_live_hook() -> None:
    model = transformer(layers=1)
    optimizer = GoMuon(model)
    twin = copy.deepcopy(model)
    train(twin, torch.optim.SGD(twin.parameters(), lr=0.0), range(1))
    weight = twin.get_parameter("trunk.blocks.0.attention.q.weight")
    assert weight not in optimizer._capture.groups[0].collect()
    assert all(
        statistics.gradients is None
        for statistics in optimizer._capture.groups[0].collect().values()
    )


def test_pickled_together_and_attached_again_trains_on() -> None:
    model = transformer(layers=1)
    optimizer = GoMuon(model)
    train(model, optimizer, range(6))
    twin, twin_optimizer = pickle.loads(pickle.dumps((model, optimizer)))
    twin_optimizer.attach(twin)
    train(model, optimizer, range(6, 12))
    train(twin, twin_optimizer, range(6, 12))
    assert_same(model, twin)


def test_public_attributes_are_torchs() -> None:
    """torch compares public attributes of copied optimizers."""
    public = {name for name in vars(GoMuon(mlp(3, 4, 2))) if not name.startswith("_")}
    assert public == {"defaults", "state", "param_groups"}


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: mlp(4, 6, 6, 3), "momentum of '0.weight' has shape"),
        (lambda: mlp(4, 5, 5, 5, 3), "group 0 of the checkpoint has"),
        (lambda: mlp(4, 5, 5, 3, bias=False), "group 1 of the checkpoint has"),
    ],
)
def test_a_checkpoint_that_does_not_fit_changes_nothing(
    other: Callable[[], nn.Module], message: str
) -> None:
    model, stranger = mlp(4, 5, 5, 3), other()
    optimizer, source = GoMuon(model), GoMuon(stranger)
    for m, o in ((model, optimizer), (stranger, source)):
        m(torch.randn(7, 4, dtype=torch.float64)).square().mean().backward()
        o.step()
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(source.state_dict())
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for index, entries in before["state"].items():
        for key, value in entries.items():
            found = after["state"][index][key]
            assert torch.equal(found, value) if isinstance(value, Tensor) else found == value


def test_a_newer_format_is_refused() -> None:
    optimizer = GoMuon(mlp(3, 4, 2))
    with pytest.raises(ValueError, match="format 99"):
        optimizer.load_state_dict({**optimizer.state_dict(), "format": 99})


# ---- how layers are cut --------------------------------------------------------------------------

HEADS = {"0.weight": LayerSpec(heads=2)}


def test_a_pickled_optimizer_keeps_its_specs() -> None:
    model = mlp(6, 8, 8, 3)
    optimizer = GoMuon(model, specs=HEADS)
    train_mlp(model, optimizer, range(3))
    again, resumed = pickle.loads(pickle.dumps((model, optimizer)))
    resumed.attach(again)
    train_mlp(model, optimizer, range(3, 8))
    train_mlp(again, resumed, range(3, 8))
    assert_same(model, again)
    assert resumed.state[again[0].weight]["left_map"].shape == (2, 4, 4)


@pytest.mark.parametrize("cut", [True, False], ids=["cut here", "cut there"])
def test_a_checkpoint_of_another_cut_is_refused(cut: bool) -> None:
    model, other = mlp(6, 8, 8, 3), mlp(6, 8, 8, 3)
    optimizer = GoMuon(model, specs=None if cut else HEADS)
    train_mlp(model, optimizer, range(2))
    target = GoMuon(other, specs=HEADS if cut else None)
    sides = (8, 4) if cut else (4, 8)
    words = f"left_factor of '0.weight' is for matrices with a side of {sides[0]} in the "
    with pytest.raises(ValueError, match=f"{words}checkpoint, but here that side is {sides[1]}"):
        target.load_state_dict(optimizer.state_dict())
    assert not target.state
    train_mlp(other, target, range(2))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"alpha": 0.25}, {"alpha": 0.0}),
        ({"token_stride": 2}, {"token_stride": 1}),
        ({"rows": 9}, {"rows": None}),
    ],
    ids=["alpha", "token_stride", "rows"],
)
def test_hooks_follow_the_settings_of_a_checkpoint(
    before: dict[str, Any], after: dict[str, Any]
) -> None:
    model, other = mlp(6, 8, 8, 3), mlp(6, 8, 8, 3)
    optimizer = GoMuon(model, refresh_every=1, **before)
    train_mlp(model, optimizer, range(3))
    resumed = GoMuon(other, refresh_every=1, **after)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(optimizer.state_dict())
    train_mlp(model, optimizer, range(3, 8))
    train_mlp(other, resumed, range(3, 8))
    assert_same(model, other)


def train_mlp(model: nn.Module, optimizer: MatrixOptimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        x = torch.randn(4, 6, 6, generator=torch.Generator().manual_seed(step)).double()
        model(x).square().mean().backward()
        optimizer.step()


def test_a_single_number_among_the_parameters_is_saved_and_loaded() -> None:
    model, other = mlp(6, 8, 3), mlp(6, 8, 3)
    for one in (model, other):
        one.register_parameter("scale", nn.Parameter(torch.tensor(1.0).double()))
    optimizer, resumed = GoMuon(model), GoMuon(other)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    resumed.load_state_dict(optimizer.state_dict())
    assert torch.equal(
        resumed.state[other.get_parameter("scale")]["exp_avg"],
        optimizer.state[model.get_parameter("scale")]["exp_avg"],
    )


def test_an_unpickled_optimizer_loads_before_it_is_attached() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3, groups=4), nn.Flatten(), nn.Linear(8, 2))
    optimizer = GoMuon(model)
    model(torch.randn(2, 4, 3, 3)).sum().backward()
    optimizer.step()
    again, resumed = pickle.loads(pickle.dumps((model, optimizer)))
    resumed.load_state_dict(optimizer.state_dict())
    resumed.attach(again)
    assert resumed.state[again[0].weight]["left_map"].shape == (4, 2, 2)
