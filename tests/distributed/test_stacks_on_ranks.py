"""Stacks of matrices on several ranks: n ranks equal one rank with the union of their batches."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gomuon import GoMuon
from tests.distributed.launcher import Place, launch
from tests.distributed.worlds import Weights, assert_alike, distance, run
from tests.models import SYMBOLS


class ExpertBlock(nn.Module):
    """Four experts, one for each residue of the token; ranks see them unevenly."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 12, 8) / 3)
        self.down = nn.Parameter(torch.randn(4, 8, 12) / 3)

    def forward(self, x: Tensor, which: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for e in range(4):
            rows = (which == e).nonzero(as_tuple=True)
            hidden = F.linear(x[rows], self.up[e]).tanh()
            y = y.index_put(rows, F.linear(hidden, self.down[e]))
        return x + y


class ExpertModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(SYMBOLS, 8)
        self.blocks = nn.ModuleList(ExpertBlock() for _ in range(2))
        self.gate = nn.Parameter(torch.randn(8, 8) / 3)
        self.value = nn.Parameter(torch.randn(8, 8) / 3)
        self.hidden = nn.Linear(8, 8)
        self.head = nn.Linear(8, SYMBOLS)

    def forward(self, window: Tensor) -> Tensor:
        x = self.tokens(window)
        for block in self.blocks:
            x = block(x, window * window % 7 % 4)  # no token goes to the fourth expert
        x = x + F.linear(x, self.gate).sigmoid() * F.linear(x, self.value)  # of one input
        first, rest = x[:, :4], x[:, 4:]  # a layer's weight, used with and without the layer
        hidden = [F.linear(first, self.hidden.weight, self.hidden.bias), self.hidden(rest)]
        logits: Tensor = self.head(torch.cat(hidden, 1).tanh())
        return logits


def build() -> nn.Module:
    torch.manual_seed(0)
    return ExpertModel().double()


def make(model: nn.Module, **settings: Any) -> GoMuon:
    routes = dict.fromkeys(("*.up", "*.down", "gate", "value"), "matrix")
    return GoMuon(model, routes=routes, stagger=False, **settings)  # type: ignore[arg-type]


def with_owners(place: Place | None, kind: str, every: int) -> tuple[Weights, list[str]]:
    made: list[GoMuon] = []

    def make_one(model: nn.Module) -> GoMuon:
        made.append(make(model, refresh_every=every))
        return made[0]

    weights = run(place, kind, make_one, 8, build)
    owners = made[0].owners()
    return weights, sorted(f"{name}:{owner}" for name, owner in owners.items())


def cases(place: Place) -> dict[tuple[str, int], tuple[Weights, list[str]]]:
    return {(kind, every): with_owners(place, kind, every) for kind, every in CASES}


CASES = (("ddp", 2), ("fsdp", 2))


@pytest.mark.filterwarnings("ignore::gomuon.GeometryWarning")
def test_ranks_equal_one_with_the_union(tmp_path: Path) -> None:
    answers = launch(2, partial(cases), tmp_path)
    alone, _ = with_owners(None, "alone", 2)
    for case in CASES:
        ranks = [answer[case][0] for answer in answers]
        assert_alike(ranks)
        assert distance(ranks[0], alone) < 1e-9, case
        owners = answers[0][case][1]
        assert {name.partition(":")[2] for name in owners if "blocks" in name} == {"0", "1"}
