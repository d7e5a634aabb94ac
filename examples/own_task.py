"""A task of one's own: tell the black squares of a noisy checkerboard from the white ones.

gomuon race --task examples/own_task.py:Checkerboard --optimizers go-muon,torch.optim:Muon,adamw
"""

import torch
from torch import nn
from torch.nn import functional as F


class Checkerboard:
    """Points of a 4×4 board; a tenth of the training labels is wrong."""

    steps = 300  # updates of a run, unless --steps says otherwise
    evaluate_every = 50

    def __init__(self, seed: int, steps: int) -> None:
        self.points = torch.rand(2000, 2) * 4
        self.labels = self.points.floor().sum(1).long() % 2
        flipped = torch.rand(1000) < 0.1
        self.labels[:1000][flipped] = 1 - self.labels[:1000][flipped]

    def model(self) -> nn.Module:
        hidden = [layer for _ in range(3) for layer in (nn.Linear(32, 32), nn.GELU())]
        return nn.Sequential(nn.Linear(2, 32), nn.GELU(), *hidden, nn.Linear(32, 2))

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = torch.randint(1000, (64,))
        return self.points[chosen], self.labels[chosen]

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        points, labels = batch
        return F.cross_entropy(model(points), labels)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        logits, labels = model(self.points[1000:]), self.labels[1000:]
        accuracy = (logits.argmax(1) == labels).float().mean().item()
        return {"validation_loss": F.cross_entropy(logits, labels).item(), "accuracy": accuracy}

    def fingerprint(self) -> list[torch.Tensor]:
        return [self.points, self.labels]
