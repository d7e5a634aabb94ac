"""The defaults of methods whose first steps are long train a small MLP from the start."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gomuon import Shampoo


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_shampoo_does_not_diverge(seed: int) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    )
    x = torch.randn(512, 16)
    y = torch.tanh(x @ torch.randn(16, 10)).argmax(1)
    optimizer = Shampoo(model)
    losses = []
    for _ in range(60):
        rows = torch.randint(0, 512, (64,))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[rows]), y[rows])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert max(losses) < 1.2 * losses[0]  # at a rate of .01 it grew to 16 times as much
    assert sum(losses[-10:]) / 10 < 0.5 * losses[0]
