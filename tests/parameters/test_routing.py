"""Every parameter has a treatment, and the table says why."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gomuon import KFAC, GoMuon
from gomuon.parameters.routing import RoutingTable, route
from tests.models import mlp, transformer


def treatments(table: RoutingTable) -> dict[str, str]:
    return {row.name: row.treatment for row in table}


class Everything(nn.Module):
    """One parameter of each kind users have."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 4)
        self.positions = nn.Parameter(torch.zeros(1, 9, 4))
        self.cls = nn.Parameter(torch.zeros(1, 1, 4))
        self.temperature = nn.Parameter(torch.ones(()))
        self.hidden = nn.Linear(4, 6)
        self.norm = nn.LayerNorm(6)
        self.patch = nn.Conv2d(3, 4, 2)
        self.attention = nn.MultiheadAttention(4, 2)
        self.lm_head = nn.Linear(6, 7, bias=False)


def test_each_kind_has_its_place() -> None:
    assert treatments(route(Everything())) == {
        "tokens.weight": "adamw",
        "positions": "adamw",
        "cls": "adamw",
        "temperature": "adamw",
        "hidden.weight": "matrix",
        "hidden.bias": "adamw",
        "norm.weight": "adamw",
        "norm.bias": "adamw",
        "patch.weight": "matrix",
        "patch.bias": "adamw",
        "attention.in_proj_weight": "matrix",
        "attention.in_proj_bias": "adamw",
        "attention.out_proj.weight": "matrix",
        "attention.out_proj.bias": "adamw",
        "lm_head.weight": "adamw",
    }


def test_no_parameter_is_dropped() -> None:
    for model in (Everything(), transformer(), mlp(3, 4, 4, 2)):
        optimizer = GoMuon(model)
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        assert held == {id(p) for p in model.parameters()}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.hidden = nn.Linear(4, 4)
        self.out = nn.Linear(4, 7, bias=False)
        self.out.weight = self.embedding.weight


def test_a_tied_head_is_one_parameter_treated_as_the_embedding() -> None:
    table = route(Tied())
    assert treatments(table)["embedding.weight"] == "adamw"
    assert "out.weight" not in treatments(table)
    assert "tied to out.weight" in str(table)


@pytest.mark.parametrize(
    ("make", "head"),
    [
        (lambda: mlp(3, 4, 4, 2), "4.weight"),
        (lambda: nn.Sequential(nn.Linear(3, 3)), None),
        (lambda: transformer(layers=1), None),
        (lambda: transformer(layers=3), None),
    ],
    ids=["last of an MLP", "a lone layer", "inside one block", "inside blocks"],
)
def test_the_output_head(make: Any, head: str | None) -> None:
    found = [row.name for row in route(make()) if row.reason.startswith("output head")]
    assert found == ([head] if head else [])


def test_the_head_a_model_declares() -> None:
    class Declares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decoder, self.body = nn.Linear(4, 7), nn.Linear(4, 4)

        def get_output_embeddings(self) -> nn.Module:
            return self.decoder

    assert treatments(route(Declares()))["decoder.weight"] == "adamw"
    assert treatments(route(Declares()))["body.weight"] == "matrix"


def test_patterns_override() -> None:
    model = mlp(3, 4, 4, 2)
    table = route(model, {"4.weight": "matrix", "0.*": "adamw", "2.bias": "frozen"})
    assert treatments(table) == {
        "0.weight": "adamw",
        "0.bias": "adamw",
        "2.weight": "matrix",
        "2.bias": "frozen",
        "4.weight": "matrix",
        "4.bias": "adamw",
    }
    optimizer = GoMuon(model, routes={"2.bias": "frozen"})
    bias = model.get_parameter("2.bias")
    assert all(p is not bias for group in optimizer.param_groups for p in group["params"])
    assert "frozen" in str(optimizer.routing_table())


def test_a_function_overrides() -> None:
    def no_square(name: str, module: nn.Module, parameter: Tensor) -> Any:
        square = parameter.ndim == 2 and parameter.shape[0] == parameter.shape[1]
        return "adamw" if square else None

    assert treatments(route(mlp(3, 4, 4, 2), no_square))["2.weight"] == "adamw"
    assert treatments(route(mlp(3, 4, 4, 2), no_square))["0.weight"] == "matrix"


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        ({"0.wieght": "matrix"}, "did you mean '0.weight'"),
        ({"zzz": "matrix"}, "matches no parameter"),
        ({"0.weight": "sgd"}, "treatment 'sgd'; expected one of"),
        (lambda name, module, parameter: "other", "treatment 'other'"),
    ],
)
def test_overrides_that_cannot_be_meant_are_refused(routes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GoMuon(mlp(3, 4, 4, 2), routes=routes)


def test_routes_without_a_model_are_refused() -> None:
    with pytest.raises(ValueError, match="need the model"):
        GoMuon(mlp(3, 4, 2).parameters(), routes={"0.weight": "adamw"})


def test_printing_shows_the_table() -> None:
    optimizer = GoMuon(mlp(3, 4, 4, 2))
    text = str(optimizer)
    assert "GoMuon" in text
    for row in optimizer.routing_table():
        assert row.name in text
        assert row.reason in text


def test_an_integer_parameter_can_be_left_out() -> None:
    model = mlp(3, 4, 2)
    table = nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False)
    model.register_parameter("table", table)
    assert (
        treatments(GoMuon(model, routes={"table": "frozen"}).routing_table())["table"] == "frozen"
    )


class Flipped(nn.Module):
    """Its convolutions go to AdamW for reasons of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.circular = nn.Conv2d(3, 4, 3, padding_mode="circular")
        self.transposed = nn.ConvTranspose2d(4, 4, 2)
        self.hidden, self.last = nn.Linear(4, 4), nn.Linear(4, 2)


@pytest.mark.filterwarnings("ignore:only .* of the weights")
def test_why_a_convolution_is_left_out() -> None:
    reasons = {row.name: row.reason for row in route(Flipped())}
    assert "padding_mode='circular'" in reasons["circular.weight"]
    assert "transposed convolution" in reasons["transposed.weight"]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_originals_of_normalised_weights_go_to_adamw(norm: Any) -> None:
    """As docs/compatibility.md says, in torch's old form as in the new one."""
    old = mlp(3, 4, 4, 4, 2)
    norm(old[2])
    new = mlp(3, 4, 4, 4, 2)
    getattr(nn.utils.parametrizations, norm.__name__)(new[2])
    for model in (old, new):
        table = treatments(route(model))
        originals = [name for name in table if name.startswith("2.") and name != "2.bias"]
        assert originals
        assert all(table[name] == "adamw" for name in originals)
        assert table["4.weight"] == "matrix"


def test_frozen_parameters_are_shown_as_frozen_until_they_are_trained() -> None:
    model = mlp(3, 4, 4, 2)
    weight = model.get_parameter("0.weight")
    weight.requires_grad = False
    optimizer = GoMuon(model)

    def row() -> str:
        return next(x for x in str(optimizer.routing_table()).split("\n") if "0.weight" in x)

    assert " frozen " in row()
    assert "matrix when trained: linear layer" in row()
    assert "frozen 26 %" in str(optimizer.routing_table())  # 12 of 46
    weight.requires_grad = True
    assert " matrix " in row()


def test_wrappers_leave_no_mark_on_names() -> None:
    model = mlp(3, 4, 4, 2)
    plain = str(GoMuon(model).routing_table())
    wrapped = nn.Sequential(*model)
    wrapped[2] = torch.compile(wrapped[2])  # type: ignore[assignment]
    assert str(GoMuon(nn.DataParallel(model)).routing_table()) == plain
    assert str(GoMuon(wrapped).routing_table()) == plain


def test_making_an_optimizer_does_not_advance_spectral_norms() -> None:
    """Such a norm changes its state whenever its weight is read in training."""
    torch.manual_seed(0)
    normed = [nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)) for _ in range(2)]
    model = nn.Sequential(*normed, nn.Linear(4, 4), nn.Linear(4, 2)).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for kind in (GoMuon, KFAC):
        kind(model)
        kind(model, example_input=torch.randn(3, 4))
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
