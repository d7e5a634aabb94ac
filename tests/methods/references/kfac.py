"""K-FAC, and Muon in its factors: as kfac-muon was published, and as we do it."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from tests.methods.references.plain import (
    Reference,
    eye,
    inverse_power,
    lerp,
    muon_scale,
    polar,
)


class KFAC(Reference):
    """With a bias, W is [W b] and x carries a last column of ones."""

    def __init__(
        self,
        W: Tensor,
        lr: float = 0.1,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        factor_decay: float = 0.95,
        damping: float = 1e-3,
        kl_clip: float | None = 1e-3,
        statistics_every: int = 1,
        refresh_every: int = 1,
    ) -> None:
        super().__init__(W, lr, weight_decay)
        self.momentum, self.beta = momentum, factor_decay
        self.damping, self.kl_clip = damping, kl_clip
        self.statistics_every, self.refresh_every = statistics_every, refresh_every
        self.B, self.A = (torch.eye(d, dtype=W.dtype) for d in W.shape)

    def update(self, G: Tensor, x: Tensor, delta: Tensor) -> Tensor:
        D = self.natural_gradient(G, x, delta)
        return self.with_momentum(D, self.clip([(G, D)]))

    def natural_gradient(self, G: Tensor, x: Tensor, delta: Tensor) -> Tensor:
        if self.t % self.statistics_every == 0:
            self.A = self.beta * self.A + (1 - self.beta) * self.right.moment(x)
            self.B = self.beta * self.B + (1 - self.beta) * self.left.moment(delta)
        if self.t % self.refresh_every == 0:
            self.lambda_A, self.V_A = torch.linalg.eigh(self.A)
            self.lambda_B, self.V_B = torch.linalg.eigh(self.B)
        curvature = torch.outer(self.lambda_B, self.lambda_A) + self.damping
        return self.V_B @ ((self.V_B.T @ G @ self.V_A) / curvature) @ self.V_A.T

    def clip(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
        """ν, from (G, D) of every layer."""
        if self.kl_clip is None:
            return 1.0
        quadratic = sum(self.lr**2 * float((G * D).sum()) for G, D in pairs)
        return min(1.0, math.sqrt(self.kl_clip / abs(quadratic)))

    def with_momentum(self, D: Tensor, nu: float) -> Tensor:
        self.M = self.momentum * self.M + nu * D
        return self.M


def step_together(layers: list[KFAC], seen: list[tuple[Tensor, Tensor, Tensor]]) -> None:
    """One K-FAC step of several layers under one KL clip; `seen` holds (G, x, δ) of each."""
    directions = [layer.natural_gradient(*what) for layer, what in zip(layers, seen, strict=True)]
    nu = layers[0].clip([(G, D) for (G, _, _), D in zip(seen, directions, strict=True)])
    for layer, D in zip(layers, directions, strict=True):
        U = layer.with_momentum(D, nu)
        layer.W = (1 - layer.lr * layer.weight_decay) * layer.W - layer.lr * U
        layer.t += 1


class MuonInKFACFactors(Reference):
    """x [..., n] and δ [..., m] may have positions between the examples and the features."""

    A: Tensor
    B: Tensor
    damping: float
    momentum: float
    nesterov: bool

    def observed(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """K-FAC-reduce: x averaged and δ summed over positions, one row an example."""
        examples = len(x)
        A = self.right.moment(x.reshape(examples, -1, self.n).mean(1))
        return A, self.left.moment(delta.reshape(examples, -1, self.m).sum(1))

    def make_maps(self) -> None:
        pi = math.sqrt((self.A.trace() / self.n) / (self.B.trace() / self.m))
        ridge = math.sqrt(self.damping)
        self.P_A = inverse_power(self.A + pi * ridge * eye(self.A), 0.5)
        self.P_B = inverse_power(self.B + ridge / pi * eye(self.B), 0.5)

    def direction(self, G: Tensor) -> Tensor:
        self.M, X = lerp(G, self.M, self.momentum, self.nesterov)
        return self.P_B @ polar(self.P_B @ X @ self.P_A) @ self.P_A


class KFACMuon(MuonInKFACFactors):
    """LukeTri/kfac-muon, train.py at e4f79cc825fe2270034558b353b659a55a824f23, static damping."""

    def __init__(
        self,
        W: Tensor,
        lr: float = 0.02,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        factor_decay: float = 0.95,
        damping: float = 1e-3,
        refresh_every: int = 20,
        refresh_at: str = "last",
        scale: float = 0.1,
    ) -> None:
        super().__init__(W, lr, weight_decay)
        self.momentum, self.nesterov = momentum, nesterov
        self.beta, self.damping, self.scale = factor_decay, damping, scale
        self.refresh_every, self.refresh_at = refresh_every, refresh_at
        self.A, self.B = (torch.eye(d, dtype=W.dtype) for d in (self.n, self.m))
        self.make_maps()  # (1 + √λ)^(−1/2)·I

    def update(self, G: Tensor, x: Tensor, delta: Tensor) -> Tensor:
        if (self.t + (self.refresh_at == "last")) % self.refresh_every == 0:
            A, B = self.observed(x, delta)
            self.A = self.beta * self.A + (1 - self.beta) * A
            self.B = self.beta * self.B + (1 - self.beta) * B
            self.make_maps()
        return self.scale * self.direction(G)


class MatchedKFAC(MuonInKFACFactors):
    """The first refresh is at the first update, and its observation starts the averages."""

    def __init__(
        self,
        W: Tensor,
        lr: float = 0.02,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        factor_decay: float = 0.95,
        damping: float = 1e-3,
        refresh_every: int = 50,
        scale: float = 0.1,
    ) -> None:
        super().__init__(W, lr, weight_decay)
        self.momentum, self.nesterov = momentum, nesterov
        self.beta, self.damping = factor_decay, damping
        self.refresh_every, self.scale = refresh_every, scale

    def update(self, G: Tensor, x: Tensor, delta: Tensor) -> Tensor:
        if self.t % self.refresh_every == 0:
            A, B = self.observed(x, delta)
            first = self.t == 0
            self.A = A if first else self.beta * self.A + (1 - self.beta) * A
            self.B = B if first else self.beta * self.B + (1 - self.beta) * B
            self.make_maps()
        return self.scale * muon_scale(self.direction(G))
