"""Weights that functions multiply with, experts above all: the plan against real steps."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gomuon.geometry import rotating_basis
from gomuon.lab.costs import planned_model
from gomuon.lab.costs.estimate import RankLayout, estimate_cost
from gomuon.lab.costs.input_uses import find_input_uses
from gomuon.lab.costs.traffic import Mesh
from gomuon.lab.experiments import optimizers
from gomuon.methods import kfac, soap
from tests.counting import counted
from tests.distributed.launcher import Place, launch
from tests.distributed.test_traffic import counted as bytes_counted
from tests.distributed.worlds import wrapped
from tests.lab.costs.test_unit_costs import Case, check_every_operation_and_byte

WIDTH, EXPERTS, CHOSEN = 12, 3, 2
BATCH, LENGTH = 6, 10


class Functions(nn.Module):
    """`F.linear`, a stack whose matrices read one tensor, one whose matrices do not, attention."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(20, WIDTH)
        self.plain = nn.Parameter(torch.randn(9, WIDTH))
        self.stack = nn.Parameter(torch.randn(4, 7, 9))
        self.apart = nn.Parameter(torch.randn(4, 8, 7))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(F.linear(torch.tanh(self.first(x)), self.plain))
        each = torch.tanh(torch.einsum("bti,eoi->ebto", h, self.stack))
        own = torch.bmm(each.flatten(1, 2), self.apart.mT).mean(0).view(*x.shape[:2], 8)
        mixed: Tensor = self.attention(own, own, own, need_weights=False)[0]
        out: Tensor = self.head(mixed)
        return out


class Experts(nn.Module):
    """Which of them reads which rows is known from values only."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts, self.hidden_size = EXPERTS, WIDTH
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * 10, WIDTH) / 3)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, WIDTH, 10) / 3)

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden)
        for number in range(EXPERTS):
            row, place = (chosen == number).nonzero(as_tuple=True)
            gate, up = F.linear(hidden[row], self.gate_up_proj[number]).chunk(2, -1)
            own = F.linear(F.silu(gate) * up, self.down_proj[number])
            out = out.index_add(0, row, own * weights[row, place, None])
        return out


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.router = nn.Linear(20, WIDTH), nn.Linear(WIDTH, EXPERTS)
        self.experts = Experts()
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x)).flatten(0, -2)
        weights, chosen = self.router(hidden).softmax(-1).topk(CHOSEN, -1)
        out: Tensor = self.head(torch.tanh(self.experts(hidden, chosen, weights)))
        return out


X = torch.randn(BATCH, LENGTH, 20, generator=torch.Generator().manual_seed(1)).double()
CASES = {
    "functions": Case(
        lambda: Functions().double(), X, routes=dict.fromkeys(("plain", "stack", "apart"), "matrix")
    ),
    "mixture": Case(lambda: Mixture().double(), X),
}
METHODS: list[tuple[str, dict[str, Any]]] = [
    ("GoMuon", {}),
    ("GoMuon", {"input_decay": 0.9, "block_size": 5}),
    ("GoMuon", {"max_side": 10, "long_sides": "diagonal"}),
    ("GoMuon", {"state_dtype": "int8"}),
    ("GoMuon", {"alpha": (0.0, 0.25)}),
    ("GoMuon", {"token_stride": 2}),
    ("KFAC", {}),
    ("MatchedKFAC", {"reduce": False}),
    ("NewtonMuon", {}),
    ("Muon", {}),
    ("Shampoo", {}),
    ("SOAP", {}),
]


@pytest.fixture(autouse=True)
def few_first_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (kfac, soap, rotating_basis):
        monkeypatch.setattr(module, "FIRST_STEPS", 3)


@pytest.mark.parametrize("on", CASES)
@pytest.mark.parametrize(
    ("name", "settings"), [pytest.param(*one, id="-".join([one[0], *one[1]])) for one in METHODS]
)
def test_every_operation_and_every_byte_is_predicted(
    name: str, on: str, settings: dict[str, Any]
) -> None:
    check_every_operation_and_byte(name, CASES[on], settings)


@pytest.mark.parametrize("settings", [{"rows": 7}, {"rows": 7, "reduce": True}])
def test_rows_are_bounded_for_each_matrix(settings: dict[str, Any]) -> None:
    """Not of experts: these have as many rows as happen to choose them."""
    check_every_operation_and_byte("MatchedKFAC", CASES["functions"], settings)


def test_what_weights_of_functions_read() -> None:
    model, x = Functions().double(), X
    uses = find_input_uses(model, x)
    rows = BATCH * LENGTH
    found = {
        name: (uses[p].rows, uses[p].calls, uses[p].copies, uses[p].in_sequences)
        for name, p in model.named_parameters()
        if p in uses
    }
    assert found == {
        "first.weight": (rows, 1, 1, True),
        "plain": (rows, 1, 1, True),
        "stack": (4 * rows, 4, 4, True),
        "apart": (4 * rows, 4, 1, False),
        "attention.in_proj_weight": (rows, 1, 1, True),
        "attention.out_proj.weight": (rows, 1, 1, False),
        "head.weight": (rows, 1, 1, True),
    }


def test_experts_elsewhere_are_not_replaced() -> None:
    model = Mixture()

    def fail(*_: Any) -> None:
        raise ArithmeticError("no experts")

    model.experts.forward = fail  # type: ignore[method-assign, assignment]
    with pytest.raises(ArithmeticError, match="no experts"):
        find_input_uses(model, X.float())


# ---- a plan --------------------------------------------------------------------------------------

PLANNED = partial(
    planned_model.users_model, "tests.lab.costs.test_input_uses:Mixture", f"1,{LENGTH},20"
)


def test_experts_are_in_the_models_work() -> None:
    about = PLANNED(BATCH * LENGTH, "float64")
    model = Mixture().double()
    real, _ = counted(lambda: model(X.requires_grad_()).sum().backward())
    X.requires_grad_(False)
    assert real == about.model_flops


def bytes_of_steps(place: Place, cases: list[tuple[str, dict[str, Any]]]) -> list[list[float]]:
    found = []
    for method, settings in cases:
        model = wrapped(Mixture().double(), "ddp")
        optimizer = optimizers.build(method, model, 1e-3, 1e-3, settings)
        sent = []
        for step in range(5):
            optimizer.zero_grad()
            loss = model(X).square().mean()
            if step == 0:
                loss.backward()
                optimizer.step()
                continue
            with bytes_counted(place) as bytes_sent:
                loss.backward()
                optimizer.step()
            sent.append(bytes_sent[0])
        found.append(sent)
    return found


def test_sums_of_experts_travel_with_numbers_of_rows_for_each(tmp_path: Path) -> None:
    cases: list[tuple[str, dict[str, Any]]] = [
        ("go-muon", {}),
        ("go-muon", {"stagger": False, "sums_dtype": "bfloat16"}),
        ("kfac", {}),
    ]
    about = PLANNED(BATCH * LENGTH, "float64")
    answers = launch(2, bytes_of_steps, tmp_path, cases=cases)
    for index, (method, settings) in enumerate(cases):
        cost = estimate_cost(method, about, RankLayout(Mesh(replicas=2)), settings)
        for step in range(1, 5):
            sent = [answer[index][step - 1] for answer in answers]
            expected = cost.cycle[step % len(cost.cycle)].sent
            assert max(sent) == pytest.approx(expected.largest, abs=1), (method, step)
            assert sum(sent) / 2 == pytest.approx(expected.mean, abs=1), (method, step)
