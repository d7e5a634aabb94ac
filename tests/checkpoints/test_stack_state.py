"""The state of stacks of matrices: resumed bit for bit, and checked when it is loaded."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gomuon import GoMuon


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(3, 5, 4) / 2)

    def forward(self, x: Tensor, tokens: tuple[int, ...]) -> Tensor:
        parts = zip(x.split(tokens), self.weight, strict=True)
        return torch.cat([F.linear(part, one) for part, one in parts if len(part)])


TOKENS = [(4, 4, 0), (2, 6, 0), (8, 0, 0), (1, 1, 6), (0, 4, 4), (3, 3, 2), (4, 0, 4), (8, 0, 0)]


def trained(
    steps: range,
    model: Experts,
    optimizer: GoMuon,
    tokens: list[tuple[int, ...]] = TOKENS,  # type: ignore[assignment]
) -> None:
    for step in steps:
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x, tokens[step]).sin().sum().backward()
        optimizer.step()


def made(**settings: Any) -> tuple[Experts, GoMuon]:
    model = Experts()
    settings = {"refresh_every": 2, "input_decay": 0.9, **settings}
    return model, GoMuon(model, routes={"weight": "matrix"}, **settings)


@pytest.mark.parametrize(
    "settings", [{}, {"input_decay": None}, {"state_dtype": "bfloat16"}], ids=str
)
def test_training_continues_bit_for_bit(settings: dict[str, Any]) -> None:
    model, optimizer = made(**settings)
    trained(range(5), model, optimizer)
    other, resumed = made(**settings)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, its in ((model, optimizer), (other, resumed)):
        trained(range(5, 8), one, its)
    assert torch.equal(model.weight, other.weight)
    for key, value in optimizer.state[model.weight].items():
        assert torch.equal(
            torch.as_tensor(value), torch.as_tensor(resumed.state[other.weight][key])
        )


def test_each_matrix_has_its_last_observation() -> None:
    model, optimizer = made()
    trained(range(1), model, optimizer)
    assert optimizer.state[model.weight]["left_seen_each"].tolist() == [1, 1, 0]
    trained(range(1, 4), model, optimizer)  # refreshes in step 2, where one expert has all tokens
    assert optimizer.state[model.weight]["left_seen_each"].tolist() == [3, 1, 0]
    assert optimizer.state[model.weight]["left_seen_each"].dtype == torch.float32
    trained(range(4, 5), model, optimizer)
    assert optimizer.state[model.weight]["left_seen_each"].tolist() == [3, 5, 5]
    # A matrix that had no rows yet has a zero factor and the identity as its map.
    model, optimizer = made()
    trained(range(3), model, optimizer)
    state = optimizer.state[model.weight]
    assert not state["left_factor"][2].any()
    torch.testing.assert_close(state["left_map"][2], torch.eye(5))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (torch.zeros(2), r"left_seen_each of 'weight' has shape \(2,\).*each of 3 matrices"),
        (torch.zeros(3, 1), "expected one number for each of 3 matrices"),
        (torch.tensor([0.0, 1.0, 9.0]), "has taken 4 steps"),
        (torch.tensor([0.0, -1.0, 1.0]), "expected numbers from 0 to that"),
        (torch.tensor([0.0, float("nan"), 1.0]), "expected numbers from 0 to that"),
        (3, "expected a tensor"),
    ],
)
def test_damaged_counts_are_refused(wrong: Any, message: str) -> None:
    model, optimizer = made()
    trained(range(4), model, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["left_seen_each"] = wrong
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
