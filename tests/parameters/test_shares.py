"""The last line of a routing table, and the warning of a model with few matrices."""

import warnings

import pytest
import torch
from torch import nn

from gomuon import GeometryWarning, GoMuon, Muon
from gomuon.parameters.routing import Treatment
from tests.models import mlp, transformer


class Tokens(nn.Module):
    """Embedding 10×4, three matrices 4×4 of which one is captured, a head 10×4, a norm of 4."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(10, 4)
        self.hidden = nn.Linear(4, 4, bias=False)
        self.memory = nn.RNN(4, 4, bias=False)
        self.norm = nn.RMSNorm(4)
        self.lm_head = nn.Linear(4, 10, bias=False)


def last_line(optimizer: torch.optim.Optimizer) -> str:
    assert isinstance(optimizer, GoMuon | Muon)
    return str(optimizer.routing_table()).split("\n")[-1]


def test_the_last_line_adds_up() -> None:
    assert last_line(GoMuon(Tokens())) == (
        "132 parameters: matrix 36 % (captured 12 %, identity maps 24 %), "
        "AdamW 64 %: embedding 30 %, head 30 %, biases and vectors 3 %"
    )
    assert last_line(Muon(Tokens())).startswith("132 parameters: matrix 36 %, AdamW")
    frozen = last_line(GoMuon(Tokens(), routes={"tokens.*": "frozen"}))
    assert frozen.endswith("AdamW 33 %: head 30 %, biases and vectors 3 %; frozen 30 %")


def test_bare_parameters_are_counted_too() -> None:
    model = mlp(3, 4, 2)
    assert last_line(Muon(model.parameters())) == (
        "26 parameters: matrix 77 %, AdamW 23 %: biases and vectors 23 %"
    )


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.zeros(8, 8, 8))
        self.hidden, self.lm_head = nn.Linear(8, 8), nn.Linear(8, 1000)


def test_a_model_with_few_matrices_is_warned_of() -> None:
    with pytest.warns(GeometryWarning, match="only 11 % of the weights") as caught:
        GoMuon(Mixture())  # 64 of 64 + 512; the head does not count
    assert "'experts' (Mixture is not a linear layer" in str(caught[0].message)
    assert caught[0].filename == __file__


def test_others_are_not_warned_of() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", GeometryWarning)
        for model in (transformer(), mlp(3, 4, 4, 2), mlp(3, 4, 100), Tokens()):
            GoMuon(model)
        matrices: dict[str, Treatment] = {"experts": "matrix"}
        Muon(Mixture(), routes=matrices)
        frozen = Mixture()
        frozen.experts.requires_grad_(False)  # what is not trained needs no optimizer
        GoMuon(frozen)
