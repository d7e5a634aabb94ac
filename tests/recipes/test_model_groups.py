"""Groups as torch takes them, beside the model: routed, captured, with their own settings."""

from typing import Any

import pytest
import torch
from torch import nn

from gomuon import GoMuon, Muon, Scion
from tests.models import language_loss, mlp, transformer


def nanogpt_groups(model: nn.Module) -> list[dict[str, Any]]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def rows(optimizer: Any) -> dict[str, tuple[str, float, float]]:
    return {
        name: (group["treatment"], group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for name in group["param_names"]
    }


def test_groups_are_routed_and_captured() -> None:
    model = transformer()
    optimizer = GoMuon(nanogpt_groups(model), lr=6e-4, lr_scale="adamw", model=model)
    found = rows(optimizer)
    assert found["embedding.weight"] == ("adamw", 6e-4, 0.1)
    assert found["trunk.blocks.0.attention.q.weight"] == ("matrix", 6e-4, 0.1)
    assert found["trunk.blocks.0.attention_norm.weight"] == ("adamw", 6e-4, 0.0)
    geometry = {row.name: row.geometry for row in optimizer.routing_table()}
    assert geometry["trunk.blocks.0.attention.q.weight"] == "16 × 16"
    language_loss(model, 0).backward()
    optimizer.step()
    weight = model.get_parameter("trunk.blocks.0.attention.q.weight")
    assert {"left_map", "right_map"} <= optimizer.state[weight].keys()


def test_they_train_as_the_model_alone() -> None:
    """One group with everything is the same as no group."""
    models = [transformer(), transformer()]
    optimizers = [GoMuon(models[0]), GoMuon(models[1].parameters(), model=models[1])]
    for step in range(5):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            language_loss(model, step).backward()
            optimizer.step()
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


def test_without_one_rate_adamw_keeps_its_own() -> None:
    model = mlp(3, 4, 4, 2)
    groups = [
        {"params": model[:2].parameters(), "lr": 0.01, "adamw": {"lr": 1e-4}},
        {"params": list(model[2:].named_parameters()), "lr": 0.05, "weight_decay": 0.3},
    ]
    assert rows(GoMuon(groups, model=model)) == {
        "0.weight": ("matrix", 0.01, 0.0),
        "0.bias": ("adamw", 1e-4, 0.0),
        "2.weight": ("matrix", 0.05, 0.3),
        "2.bias": ("adamw", 3e-3, 0.0),
        "4.weight": ("adamw", 3e-3, 0.0),
        "4.bias": ("adamw", 3e-3, 0.0),
    }


def test_what_is_in_no_group_is_not_trained() -> None:
    model = mlp(3, 4, 4, 2)
    optimizer = Muon(model[2:].parameters(), model=model)
    row = next(row for row in optimizer.routing_table() if row.name == "0.weight")
    assert (row.treatment, row.reason) == ("frozen", "in no group")
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(held) == 4


def test_a_group_may_have_a_treatment_and_overrides_apply() -> None:
    model = mlp(3, 4, 4, 2)
    groups = [
        {"params": [model[4].weight], "treatment": "matrix", "lr": 0.5},
        {"params": [*model[0].parameters(), *model[2].parameters(), model[4].bias]},
    ]
    optimizer = Muon(groups, model=model, overrides={"2.*": {"lr_factor": 0.5}})
    found = rows(optimizer)
    assert found["4.weight"] == ("matrix", 0.5, 0.0)
    assert found["2.weight"] == ("matrix", 0.01, 0.0)
    assert found["2.bias"] == ("adamw", 1.5e-3, 0.0)
    table = {row.name: (row.treatment, row.reason) for row in optimizer.routing_table()}
    assert table["4.weight"] == ("matrix", "set by its group")
    assert table["2.weight"] == ("matrix", "linear layer")
    signs = Scion(mlp_ := mlp(3, 4, 4, 2), head_radius=7.0)
    same = Scion([{"params": mlp_.parameters()}], model=mlp_, head_radius=7.0)
    assert rows(signs) == rows(same)
    assert [group["radius"] for group in same.param_groups] == [1.0, 1.0, 7.0]


@pytest.mark.parametrize(
    ("treatment", "weight", "bias"),
    [("adamw", "adamw", "adamw"), ("matrix", "matrix", "matrix"), ("auto", "matrix", "adamw")],
)
@pytest.mark.filterwarnings("ignore:only 0 % of the weights")
def test_the_table_shows_the_treatment_that_a_group_sets(
    treatment: str, weight: str, bias: str
) -> None:
    model = mlp(3, 4, 2)
    optimizer = GoMuon([{"params": model.parameters(), "treatment": treatment}], model=model)
    table = {row.name: row.treatment for row in optimizer.routing_table()}
    for name in ("0", "2"):  # by the rules of a model the last layer is a head
        assert (table[f"{name}.weight"], table[f"{name}.bias"]) == (weight, bias)
    with pytest.raises(ValueError, match="treatment must be"):
        GoMuon([{"params": model.parameters(), "treatment": "muon"}], model=model)


@pytest.mark.parametrize(
    ("params", "model", "error", "message"),
    [
        ([nn.Parameter(torch.zeros(2, 2))], mlp(3, 4, 2), ValueError, "not a parameter of the"),
        ([{"lr": 0.1}], mlp(3, 4, 2), ValueError, "must have 'params'"),
        ([], mlp(3, 4, 2), ValueError, "params is empty"),
        ([{"params": ["x"]}], mlp(3, 4, 2), TypeError, "must be parameters"),
        (3, mlp(3, 4, 2), TypeError, "params must be a model, parameters or"),
        (mlp(3, 4, 2), mlp(3, 4, 2), ValueError, "two models"),
        (mlp(3, 4, 2).parameters(), "mlp", TypeError, "model must be a torch.nn.Module"),
    ],
)
def test_what_cannot_be_meant_is_refused(params: Any, model: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        Muon(params, model=model)


def test_a_parameter_that_routes_leave_out_is_in_no_group() -> None:
    model = mlp(3, 4, 4, 2)
    with pytest.raises(ValueError, match=r"'0.bias', which routes leave out"):
        Muon(model.parameters(), model=model, routes={"0.bias": "frozen"})
