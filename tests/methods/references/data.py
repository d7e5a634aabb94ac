"""Fixed random inputs and output gradients for one linear layer, and how it learns from them."""

import torch
from torch import Tensor, nn

SHAPES = {"square": (5, 5), "wide": (4, 7), "tall": (7, 4), "row": (1, 5)}
ROWS = 12
# Muon²'s first source is the sign of the gradient. With this seed it is regular in every shape.
SEED = 28


def rows(step: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random numbers of a step, the same in every dtype up to rounding."""
    generator = torch.Generator().manual_seed(10_000 * SEED + 100 * step + shape[-1])
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def layer(m: int, n: int, dtype: torch.dtype = torch.float64, *, bias: bool = False) -> nn.Linear:
    torch.manual_seed(m + n)
    return nn.Linear(n, m, bias=bias).to(dtype)


def learn(
    optimizer: torch.optim.Optimizer, module: nn.Module, x: Tensor, g: Tensor, weight: float = 1.0
) -> None:
    """One update whose gradient is weight·gᵀx, with input rows x and output gradients weight·g."""
    optimizer.zero_grad()
    (weight * module(x) * g).sum().backward()
    optimizer.step()


def flat(rows: Tensor) -> Tensor:
    return rows.reshape(-1, rows.shape[-1])


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.detach().double() - theirs).norm() / theirs.norm())
