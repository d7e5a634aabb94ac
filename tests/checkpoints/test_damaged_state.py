"""Entries of a parameter's state that no training writes are refused, each with its message."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gomuon import GoMuon, LayerSpec, Muon
from tests.checkpoints.test_damaged_checkpoints import assert_refused, learn, trained
from tests.faults.checkpoints import same
from tests.methods.table import make, saved
from tests.models import mlp


def entry(checkpoint: dict[str, Any], key: str) -> dict[str, Any]:
    """The first parameter's state that has it."""
    found: dict[str, Any] = next(e for e in checkpoint["state"].values() if key in e)
    return found


COUNTERS = [
    ("GoMuon", "updates"), ("GoMuon", "left_seen"), ("GoMuon", "right_seen"),
    ("Shampoo", "observations"), ("GoMuon", "failures"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "key"), COUNTERS)
@pytest.mark.parametrize("value", [-1, 1.5, True, None, "3", torch.tensor(3), 10**30])
def test_counters_are_whole_numbers(method: str, key: str, value: Any) -> None:
    checkpoint = saved(trained(method)[1].state_dict())
    checkpoint["state"][0][key] = value
    assert_refused(method, checkpoint, f"{key} of '0.weight' is ")


def test_nothing_was_seen_later_than_now() -> None:
    checkpoint = saved(trained("GoMuon")[1].state_dict())
    checkpoint["state"][0]["left_seen"] = 900
    assert_refused(
        "GoMuon", checkpoint, "left_seen of '0.weight' is 900 in the checkpoint, but its"
    )


KEPT = [
    ("Muon", "momentum"), ("MuonSquared", "square"), ("Muon", "exp_avg"), ("Muon", "exp_avg_sq"),
    ("GoMuon", "left_factor"), ("GoMuon", "right_factor"), ("GoMuon", "left_map"),
    ("NewtonMuon", "right_map"), ("KFAC", "momentum"), ("KFAC", "left_factor"),
    ("KFAC", "left_basis"), ("KFAC", "right_basis"), ("KFAC", "left_values"),
    ("KFAC", "right_values"), ("MatchedKFAC", "left_map"), ("Shampoo", "left_factor"),
    ("Shampoo", "right_map"), ("SOAP", "square"), ("SOAP", "left_factor"), ("SOAP", "left_basis"),
    ("SOAP", "right_basis"), ("Mousse", "right_factor"), ("FISMO", "left_factor"),
    ("FISMO", "right_map"), ("MALT", "left_factor"), ("MALT", "right_factor"),
    ("MALT", "left_scale"), ("MALT", "right_scale"), ("NorMuon", "left_square"),
    ("MuonHyperball", "radius"), ("Gluon", "smoothness"), ("Gluon", "last_gradient"),
]  # fmt: skip
WRONG_TENSORS: dict[str, Callable[[Tensor], Any]] = {
    "a number": lambda value: 0.5,
    "a list": lambda value: value.tolist(),
    "None": lambda value: None,
    "integers": lambda value: value.long(),
    "complex": lambda value: value * 1j,
    "sparse": lambda value: value.to_sparse(),
    "meta": lambda value: value.to("meta"),
    "NaN": lambda value: torch.full_like(value, float("nan")),
    "infinity": lambda value: value + float("inf"),
    "four dimensions": lambda value: value.reshape(1, 1, len(value), -1),
    "a column": lambda value: value.reshape(-1, 1),
    "a scalar": lambda value: value.sum(),
    "a longer first side": lambda value: torch.cat([value, value]),
    "a shorter last side": lambda value: value[..., :-1] if value.shape[-1] > 1 else value[:0],
    "a shorter first side": lambda value: value[:-1],
    "nothing": lambda value: value.new_zeros(0),
}


@pytest.mark.parametrize(("method", "key"), KEPT)
def test_every_kept_tensor_is_checked(method: str, key: str) -> None:
    _, optimizer = trained(method)
    whole = saved(optimizer.state_dict())
    optimizer.load_state_dict(copy.deepcopy(whole))
    before = copy.deepcopy(optimizer.state_dict())
    for wrong, change in WRONG_TENSORS.items():
        checkpoint = copy.deepcopy(whole)
        entries = entry(checkpoint, key)
        entries[key] = change(entries[key])
        with pytest.raises(ValueError, match=f"^{key} of '") as refusal:
            optimizer.load_state_dict(checkpoint)
        assert refusal.value.__cause__ is None, wrong
        assert same(optimizer.state_dict(), before), wrong


def negative(value: Tensor) -> Tensor:
    return -value - 1e-3


def lopsided(value: Tensor) -> Tensor:
    return value + value.max() * torch.ones_like(value).triu(1)


IMPOSSIBLE: list[tuple[str, str, Callable[[Tensor], Tensor], str]] = [
    ("Muon", "exp_avg_sq", negative, "has values from"),
    ("SOAP", "square", negative, "has values from"),
    ("MuonSquared", "square", negative, "has values from"),
    ("MALT", "left_factor", negative, "has values from"),
    ("NorMuon", "left_square", negative, "has values from"),
    ("MuonHyperball", "radius", negative, "has values from"),
    ("Dion", "right_vectors", lambda value: 2 * value, "has values from"),
    ("Dion", "right_vectors", lambda value: value[:, :-1], "has shape (1, 3, 4)"),
    ("MALT", "right_scale", negative, "has values from"),
    ("KFAC", "left_values", negative, "has values from"),
    ("SOAP", "left_basis", lambda value: 2 * value, "has values from"),
    ("GoMuon", "left_factor", lopsided, "is not symmetric"),
    ("Mousse", "left_factor", negative, "is not positive semidefinite"),
    ("FISMO", "right_factor", torch.zeros_like, "is singular"),
]


@pytest.mark.parametrize(("method", "key", "change", "message"), IMPOSSIBLE)
def test_impossible_numbers_are_refused(
    method: str, key: str, change: Callable[[Tensor], Tensor], message: str
) -> None:
    checkpoint = saved(trained(method)[1].state_dict())
    entries = entry(checkpoint, key)
    entries[key] = change(entries[key])
    assert_refused(method, checkpoint, message)


def test_what_was_saved_with_nan_allowed_is_loaded() -> None:
    _, source = trained("GoMuon", nonfinite="allow")
    checkpoint = saved(source.state_dict())
    checkpoint["state"][0]["left_map"].fill_(float("nan"))
    _, optimizer = trained("GoMuon")
    optimizer.load_state_dict(checkpoint)
    assert optimizer.state[optimizer.param_groups[0]["params"][0]]["left_map"].isnan().all()


def test_numbers_that_float32_cannot_hold_are_refused() -> None:
    model = mlp(4, 5, 5, 3, dtype=torch.float32)
    optimizer = Muon(model)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    checkpoint = saved(optimizer.state_dict())
    checkpoint["state"][0]["momentum"] = checkpoint["state"][0]["momentum"].double() + 1e300
    with pytest.raises(ValueError, match=r"momentum of '0\.weight' holds NaN or infinity"):
        optimizer.load_state_dict(checkpoint)


@pytest.mark.parametrize("key", ["velocity", "left_scale", 7, None])
def test_an_unknown_entry_is_named(key: Any) -> None:
    checkpoint = saved(trained("GoMuon")[1].state_dict())
    checkpoint["state"][0][key] = torch.zeros(5, 4)
    assert_refused("GoMuon", checkpoint, f"the checkpoint has {key!r} in the state of '0.weight'")


@pytest.mark.parametrize(
    ("method", "key"),
    [
        ("Muon", "step"),
        ("Muon", "exp_avg"),
        ("Muon", "exp_avg_sq"),
        ("Mousse", "left_factor"),
        ("Shampoo", "right_factor"),
    ],
)
def test_a_missing_entry_is_named(method: str, key: str) -> None:
    checkpoint = saved(trained(method)[1].state_dict())
    del entry(checkpoint, key)[key]
    assert_refused(method, checkpoint, f"the checkpoint lacks {key} of ")


@pytest.mark.parametrize("value", [-1, 1.5, float("nan"), float("inf"), True, "3", None, [3]])
def test_adamw_counts_in_whole_numbers(value: Any) -> None:
    checkpoint = saved(trained("Muon")[1].state_dict())
    entry(checkpoint, "step")["step"] = value
    assert_refused("Muon", checkpoint, "in the checkpoint; expected one whole number >= 0")


def test_two_parameters_never_share_a_memory() -> None:
    """AdamW writes to it in place."""
    _, optimizer = trained("Muon")
    checkpoint = saved(optimizer.state_dict())
    first, second = [
        entries
        for entries in checkpoint["state"].values()
        if "exp_avg" in entries and entries["exp_avg"].shape == (5,)
    ]
    second["exp_avg"] = first["exp_avg"]
    optimizer.load_state_dict(checkpoint)
    moments = [e["exp_avg"] for e in optimizer.state.values() if "exp_avg" in e]
    assert len({moment.data_ptr() for moment in moments}) == len(moments)


def test_a_memory_that_is_not_cut_as_the_layer_is_refused() -> None:
    """K-FAC's biases join their weights, but only where it is given the model."""
    bare = make("KFAC", mlp(4, 5, 5, 3))  # for its groups
    checkpoint = saved(trained("KFAC")[1].state_dict())
    checkpoint["state"][0]["momentum"] = torch.zeros(5, 4).double()
    before = copy.deepcopy(bare.state_dict())
    with pytest.raises(
        ValueError, match=re.escape("the parameter has (5, 4), cut into [(1, 5, 5)]")
    ):
        bare.load_state_dict(checkpoint)
    assert same(bare.state_dict(), before)


def test_bare_parameters_are_not_cut() -> None:
    model = mlp(4, 6, 3, bias=False)
    source = GoMuon(model, specs={"0.weight": LayerSpec(heads=2)})
    learn(model, source, range(2))
    matrices = list(mlp(4, 6, 3, bias=False).parameters())
    with pytest.warns(UserWarning, match="given parameters"):
        target = GoMuon([{"params": matrices[:1]}, {"params": matrices[1:], "treatment": "adamw"}])
    for one in (target, copy.deepcopy(target)):
        with pytest.raises(ValueError, match=r"left_factor of .* side of 3 in the checkpoint"):
            one.load_state_dict(source.state_dict())


def test_one_factor_for_all_groups_of_a_convolution_is_taken_for_each() -> None:
    """Counts that are possible for another module with this cut are loaded, and trained on."""
    model = nn.Sequential(nn.Conv1d(4, 4, 2, groups=2), nn.Flatten(), nn.Linear(8, 3)).double()
    optimizer = GoMuon(model, input_decay=0.9, refresh_every=1)

    def learn_once() -> None:
        optimizer.zero_grad()
        model(torch.randn(5, 4, 3).double()).square().mean().backward()
        optimizer.step()

    learn_once()
    checkpoint = saved(optimizer.state_dict())
    factor = checkpoint["state"][0]["right_factor"]
    assert factor.shape == (2, 4, 4)
    checkpoint["state"][0]["right_factor"] = factor[:1]
    optimizer.load_state_dict(checkpoint)
    learn_once()
    assert optimizer.state[model.get_parameter("0.weight")]["right_factor"].shape == (2, 4, 4)
