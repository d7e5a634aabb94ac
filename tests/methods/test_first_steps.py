"""The defaults of methods whose first steps are long train a small MLP from the start."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gomuon


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    ("method", "settings", "share"),
    [
        ("Shampoo", {}, 0.5),
        ("Shampoo", {"preset": "original"}, 0.5),
        ("Shampoo", {"preset": "google"}, 0.5),
        ("Shampoo", {"preset": "distributed"}, 0.9),  # published rates that are slow here
        ("KFACMuon", {}, 0.9),
        ("MuonPlus", {}, 0.9),
        ("Scion", {}, 0.99),
    ],
)
def test_it_does_not_diverge(
    method: str, settings: dict[str, Any], share: float, seed: int
) -> None:
    """`share` of the first loss is what the last losses stay below."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    )
    x = torch.randn(512, 16)
    y = torch.tanh(x @ torch.randn(16, 10)).argmax(1)
    optimizer = getattr(gomuon, method)(model, **settings)
    losses = []
    for _ in range(60):
        rows = torch.randint(0, 512, (64,))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[rows]), y[rows])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert max(losses) < 1.2 * losses[0]  # Shampoo at .01: 16 times as much
    assert sum(losses[-10:]) / 10 < share * losses[0]
