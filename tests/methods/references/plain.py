"""What the references share: the step, the two momenta, moments and a few powers."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from gomuon.lab.bench.plain_loop import inverse_power, muon_scale, polar
from tests.methods.references.cut_sides import WHOLE

__all__ = [
    "Reference",
    "eye",
    "heavy_ball",
    "inverse_power",
    "lerp",
    "muon_scale",
    "polar",
]


class Reference(ABC):
    """One matrix W [m, n]; `step` takes its gradient, input rows [N, n] and δ rows [N, m]."""

    def __init__(self, W: Tensor, lr: float, weight_decay: float = 0.0) -> None:
        self.W, self.lr, self.weight_decay = W.clone(), lr, weight_decay
        self.left, self.right = WHOLE, WHOLE  # how factors of δ and x are cut
        self.m, self.n = W.shape
        self.t = 0
        self.M = torch.zeros_like(W)

    def step(self, G: Tensor, x: Tensor, delta: Tensor) -> None:
        """W ← (1 − lr·wd)·W − lr·U."""
        U = self.update(G, x, delta)
        self.W = (1 - self.lr * self.weight_decay) * self.W - self.lr * U
        self.t += 1

    @abstractmethod
    def update(self, G: Tensor, x: Tensor, delta: Tensor) -> Tensor:
        """U."""


def lerp(G: Tensor, M: Tensor, beta: float, nesterov: bool) -> tuple[Tensor, Tensor]:
    """M ← βM + (1−β)G, and X."""
    M = beta * M + (1 - beta) * G
    return M, (1 - beta) * G + beta * M if nesterov else M


def heavy_ball(G: Tensor, M: Tensor, beta: float, nesterov: bool) -> tuple[Tensor, Tensor]:
    """M ← βM + G, and X."""
    M = beta * M + G
    return M, G + beta * M if nesterov else M


def eye(like: Tensor) -> Tensor:
    return torch.eye(like.shape[0], dtype=like.dtype)
