"""Small models and batches the tests share."""

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gomuon.lab.experiments.models import Attention, CharacterModel, rotary_tables

# More symbols than the width, or the first layer's gradients would lack full rank, and the polar
# factor of a rank-deficient matrix is not unique.
SYMBOLS = 31


def transformer(
    seed: int = 0, dtype: torch.dtype = torch.float64, *, width: int = 16, layers: int = 3
) -> CharacterModel:
    """The paper's transformer made small; q, k and v read one tensor, gate and up another."""
    generator = torch.Generator().manual_seed(seed)
    model = CharacterModel(
        SYMBOLS, width=width, layers=layers, heads=2, hidden=24, generator=generator
    )
    return model.to(dtype)


class OneUnit(nn.Module):
    """Four layers with one parent, of which three read one tensor: ranks share it only if split."""

    def __init__(self, width: int = 16, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(SYMBOLS, width)
        self.blocks = nn.ModuleList([Attention(width, 2)])
        self.head = nn.Linear(width, SYMBOLS)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x)
        tables = rotary_tables(x.shape[1], hidden.shape[-1] // 2, x.device)
        logits: Tensor = self.head(self.blocks[0](hidden, tables))
        return logits


def tokens(step: int, batch: int = 6, length: int = 10) -> Tensor:
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(0, SYMBOLS, (batch, length + 1), generator=generator)


def language_loss(model: nn.Module, step: int, batch: int = 6, reduction: str = "mean") -> Tensor:
    window = tokens(step, batch)
    logits = model(window[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten(), reduction=reduction)


def cosine(step: int, steps: int) -> float:
    """The paper's schedule, from 1 to 0 over `steps` updates."""
    return 0.5 * (1 + math.cos(math.pi * step / steps))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = language_loss(model, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def mlp(
    *sizes: int, seed: int = 0, dtype: torch.dtype = torch.float64, bias: bool = True
) -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for n, m in pairwise(sizes):
        layers += [nn.Linear(n, m, bias=bias), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).to(dtype)
