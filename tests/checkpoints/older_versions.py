"""Checkpoints of every method as one version of gomuon wrote them, and where training then went.

    python tests/checkpoints/older_versions.py FILE.pt.gz

writes them with the version of gomuon that is installed. Only its public names are used.
"""

from __future__ import annotations

import gzip
import inspect
import io
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gomuon

SAVED_AT, STEPS = 6, 11


class SmallAttention(nn.Module):
    """Two heads under the names that MuonQK looks for."""

    heads = 2

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (2, 2)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        return ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(-2)


def small_model() -> nn.Module:
    torch.manual_seed(0)
    layers = (SmallAttention(), nn.LayerNorm(4), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    return nn.Sequential(*layers).double()


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(5, 7, 4, generator=generator, dtype=torch.float64)
        y = torch.randn(5, 7, 3, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()


def settings(method: str) -> dict[str, Any]:
    """A clock that turns over before and after the checkpoint."""
    known = inspect.signature(getattr(gomuon, method)).parameters
    return {"refresh_every": 4} if "refresh_every" in known else {}


def made(method: str) -> dict[str, Any]:
    model = small_model()
    optimizer = getattr(gomuon, method)(model, **settings(method))
    learn(model, optimizer, range(SAVED_AT))
    saved = {
        "model": {name: value.clone() for name, value in model.state_dict().items()},
        "optimizer": optimizer.state_dict(),
    }
    # Copied through a file, because training goes on in the same tensors.
    saved = torch.load(io.BytesIO(_as_file(saved)), weights_only=True)
    learn(model, optimizer, range(SAVED_AT, STEPS))
    return {**saved, "after": model.state_dict()}


def _as_file(thing: Any) -> bytes:
    file = io.BytesIO()
    torch.save(thing, file)
    return file.getvalue()


def read(path: Path) -> dict[str, Any]:
    """The checkpoints by method."""
    found: dict[str, Any] = torch.load(
        io.BytesIO(gzip.decompress(path.read_bytes())), weights_only=True
    )
    return found


def main(path: str) -> None:
    warnings.simplefilter("ignore")
    methods = [
        name
        for name in gomuon.__all__
        if inspect.isclass(getattr(gomuon, name))
        and issubclass(getattr(gomuon, name), torch.optim.Optimizer)
        and hasattr(getattr(gomuon, name), "recipe")
    ]
    content = _as_file({method: made(method) for method in methods})
    Path(path).write_bytes(gzip.compress(content, mtime=0))


if __name__ == "__main__":
    main(sys.argv[1])
