"""The last line of a routing table, and the warning of a model with few matrices."""

import warnings

import pytest
import torch
from torch import nn

from gomuon import GeometryWarning, GoMuon, Muon
from gomuon.parameters.routing import Treatment
from tests.models import mlp, transformer


class Tokens(nn.Module):
    """Embedding 10×4, two matrices 4×4 of which one is captured, a head 10×4, a norm of 4."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(10, 4)
        self.hidden = nn.Linear(4, 4, bias=False)
        self.bare = nn.Parameter(torch.zeros(4, 4))
        self.norm = nn.RMSNorm(4)
        self.lm_head = nn.Linear(4, 10, bias=False)


def last_line(optimizer: torch.optim.Optimizer) -> str:
    assert isinstance(optimizer, GoMuon | Muon)
    return str(optimizer.routing_table()).split("\n")[-1]


def test_the_last_line_adds_up() -> None:
    routes: dict[str, Treatment] = {"bare": "matrix"}
    assert last_line(GoMuon(Tokens(), routes=routes)) == (
        "116 parameters: matrix 28 % (captured 14 %, identity maps 14 %), "
        "AdamW 72 %: embedding 34 %, head 34 %, biases and vectors 3 %"
    )
    assert last_line(Muon(Tokens(), routes=routes)).startswith("116 parameters: matrix 28 %, AdamW")
    frozen = last_line(GoMuon(Tokens(), routes={**routes, "tokens.*": "frozen"}))
    assert frozen.endswith("AdamW 38 %: head 34 %, biases and vectors 3 %; frozen 34 %")


def test_bare_parameters_are_counted_too() -> None:
    model = mlp(3, 4, 2)
    assert last_line(Muon(model.parameters())) == (
        "26 parameters: matrix 77 %, AdamW 23 %: biases and vectors 23 %"
    )


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.LSTM(8, 8)
        self.hidden, self.lm_head = nn.Linear(8, 8), nn.Linear(8, 1000)


def test_a_model_with_few_matrices_is_warned_of() -> None:
    with pytest.warns(GeometryWarning, match="only 11 % of the weights") as caught:
        GoMuon(Recurrent())  # 64 of 64 + 2·256; the head does not count
    assert "'memory.weight_ih_l0' (LSTM is not a linear layer)" in str(caught[0].message)
    assert caught[0].filename == __file__


def test_others_are_not_warned_of() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", GeometryWarning)
        for model in (transformer(), mlp(3, 4, 4, 2), mlp(3, 4, 100), Tokens()):
            GoMuon(model)
        matrices: dict[str, Treatment] = {"memory.weight_*": "matrix"}
        Muon(Recurrent(), routes=matrices)
        frozen = Recurrent()
        frozen.memory.requires_grad_(False)  # what is not trained needs no optimizer
        GoMuon(frozen)
