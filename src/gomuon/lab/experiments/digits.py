"""Pictures of digits: a small vision transformer and a convolutional net with depthwise layers.

The pictures are those of `sklearn.datasets.load_digits`: 1,797 of 8×8 pixels, part of the package.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gomuon.lab.experiments import schedules
from gomuon.lab.experiments.gpt import GPTBlock
from gomuon.lab.experiments.run_config import VALIDATION_LOSS, RunConfig

CLASSES, SIDE, PATCH = 10, 8, 2
HELD_OUT_SHARE = 5  # every fifth picture is held out

Labelled = tuple[Tensor, Tensor]  # pictures and their labels


class DigitsViT(nn.Module):
    """A vision transformer: a convolution makes a token of each 2×2 patch."""

    def __init__(self, width: int, layers: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, PATCH, stride=PATCH)
        self.positions = nn.Parameter(0.02 * torch.randn((SIDE // PATCH) ** 2, width))
        self.blocks = nn.ModuleList(
            GPTBlock(width, heads, hidden, causal=False) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, pictures: Tensor) -> Tensor:
        """Pictures (batch, 1, 8, 8) to logits (batch, 10)."""
        x = self.patches(pictures).flatten(2).mT + self.positions
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x).mean(1))
        return out


class SeparableBlock(nn.Module):
    """A depthwise 3×3 convolution, which mixes places, and a 1×1 one, which mixes channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm = nn.GroupNorm(1, width)
        self.pointwise = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.pointwise(F.gelu(self.norm(self.depthwise(x))))
        return out


class DigitsSeparable(nn.Module):
    """A convolutional net of depthwise and 1×1 convolutions."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.blocks = nn.Sequential(*(SeparableBlock(width) for _ in range(layers)))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, pictures: Tensor) -> Tensor:
        """Pictures (batch, 1, 8, 8) to logits (batch, 10)."""
        out: Tensor = self.head(self.blocks(self.stem(pictures)).mean((2, 3)))
        return out


class DigitsTask:
    """Classify digits: random batches of four fifths of the pictures, the rest is held out."""

    max_norm: float | None = None

    def __init__(self, config: RunConfig, data_dir: str | Path | None = None) -> None:
        self.config = config
        pictures, labels = _digits()
        held_out = torch.arange(len(labels)) % HELD_OUT_SHARE == 0
        self.test = pictures[held_out], labels[held_out]
        self.train = pictures[~held_out], labels[~held_out]
        generator = torch.Generator().manual_seed(config.seed)
        size = (config.steps, config.batch)
        self.chosen = torch.randint(len(self.train[1]), size, generator=generator)

    def model(self) -> nn.Module:
        config = self.config
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(config.seed)
            if config.task == "digits-conv":
                return DigitsSeparable(config.width, config.layers)
            return DigitsViT(config.width, config.layers, config.heads, config.hidden)

    def multipliers(self) -> list[float]:
        return schedules.cosine(self.config.steps)

    def fingerprints(self) -> dict[str, Any]:
        shape = {name: getattr(self.config, name) for name in ("width", "layers", "heads")}
        return {
            "stream": self.chosen,
            "corpus": self.train[0],
            "model": {"kind": self.config.task, "hidden": self.config.hidden, **shape},
        }

    def loss(self, model: nn.Module, step: int) -> tuple[Tensor, dict[str, float]]:
        return loss_on(model, self.train, self.chosen[step - 1]), {}

    def evaluate(self, model: nn.Module, step: int) -> dict[str, float]:
        if step % self.config.evaluate_every and step != self.config.steps:
            return {}
        return evaluation(model, self.test)


def loss_on(model: nn.Module, pictures_and_labels: Labelled, chosen: Tensor) -> Tensor:
    """The loss on a minibatch."""
    pictures, labels = pictures_and_labels
    return F.cross_entropy(model(pictures[chosen]), labels[chosen])


def evaluation(model: nn.Module, pictures_and_labels: Labelled) -> dict[str, float]:
    """Loss and accuracy on held-out pictures."""
    pictures, labels = pictures_and_labels
    with torch.no_grad():
        logits = model(pictures)
    right = (logits.argmax(1) == labels).double().mean().item()
    return {VALIDATION_LOSS: F.cross_entropy(logits, labels).item(), "test_accuracy": right}


def _digits() -> tuple[Tensor, Tensor]:
    """All pictures [n, 1, 8, 8], with mean 0 and variance 1, and their labels."""
    from sklearn.datasets import load_digits  # imported late: it takes a second

    found = load_digits()
    pictures = torch.from_numpy(found.images).float().unsqueeze(1)
    pictures = (pictures - pictures.mean()) / math.sqrt(pictures.var().item())
    return pictures, torch.from_numpy(found.target).long()
