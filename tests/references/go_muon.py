"""Go-MUON with its options, and Newton-Muon, which knows the inputs alone."""

import math

import torch
from torch import Tensor

from tests.references.plain import (
    Reference,
    eye,
    inverse_power,
    lerp,
    muon_scale,
    oas,
    polar,
    second_moment,
)


class GoMuon(Reference):
    """The "Complete update", with the options that are off by default."""

    A: Tensor
    B: Tensor

    def __init__(
        self,
        W: Tensor,
        lr: float = 0.08,
        *,
        momentum: float = 0.8,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        alpha: float | tuple[float, float] = 0.25,
        refresh_every: int = 4,
        factor_decay: float = 0.97,
        input_decay: float | None = None,
        shrinkage: str | dict[str, float] = "oas",
        geometry_decay: bool = False,
        graft: str | None = "frobenius",
    ) -> None:
        super().__init__(W, lr, weight_decay)
        self.momentum, self.nesterov, self.K = momentum, nesterov, refresh_every
        self.alpha_B, self.alpha_A = alpha if isinstance(alpha, tuple) else (alpha, alpha)
        self.beta_B, self.beta_A = factor_decay, 0.0 if input_decay is None else input_decay
        self.shrinkage, self.geometry_decay, self.graft = shrinkage, geometry_decay, graft

    def step(self, G: Tensor, x: Tensor, delta: Tensor) -> None:
        """Decay in the step's geometry: W ← W − lr·wd·W P_A²/mean(P_A²) − lr·U."""
        if not self.geometry_decay:
            return super().step(G, x, delta)
        U = self.update(G, x, delta)
        metric = self.P_A @ self.P_A
        metric = metric / (metric.trace() / self.n)
        self.W = self.W - self.lr * self.weight_decay * self.W @ metric - self.lr * U
        self.t += 1
        return None

    def update(self, G: Tensor, x: Tensor, delta: Tensor) -> Tensor:
        if self.t % self.K == 0:
            A, B = self.regularised(x), self.regularised(delta)
            decay_A, decay_B = self.beta_A**self.K, self.beta_B**self.K
            if self.t > 0:
                A = decay_A * self.A + (1 - decay_A) * A
                B = decay_B * self.B + (1 - decay_B) * B
            self.A, self.B = A, B
            self.P_A = inverse_power(self.A, self.alpha_A)
            self.P_B = inverse_power(self.B, self.alpha_B)
        self.M, X = lerp(G, self.M, self.momentum, self.nesterov)
        D = self.P_B @ polar(self.P_B @ X @ self.P_A) @ self.P_A
        if self.graft == "frobenius":
            D = D * math.sqrt(min(self.m, self.n)) / D.norm()
        return muon_scale(D)

    def regularised(self, rows: Tensor) -> Tensor:
        S, d = second_moment(rows), rows.shape[1]
        if isinstance(self.shrinkage, dict):
            return S + self.shrinkage["damping"] * S.trace() / d * eye(S)
        return oas(S, len(rows)) if d > 1 else S  # a number has nothing to shrink to


class NewtonMuon(Reference):
    def __init__(
        self,
        W: Tensor,
        lr: float = 0.02,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        factor_decay: float = 0.95,
        damping: float = 0.2,
        refresh_every: int = 32,
    ) -> None:
        super().__init__(W, lr, weight_decay)
        self.momentum, self.nesterov = momentum, nesterov
        self.beta, self.damping, self.refresh_every = factor_decay, damping, refresh_every
        self.K = 0.001 * torch.eye(self.n, dtype=W.dtype)

    def update(self, G: Tensor, x: Tensor, delta: Tensor) -> Tensor:
        if self.t % self.refresh_every == 0:
            self.K = self.beta * self.K + (1 - self.beta) * second_moment(x)
            ridge = self.damping * self.K.trace() / self.n + 1e-8
            self.inverse = torch.linalg.inv(self.K + ridge * eye(self.K))
        self.M, X = lerp(G @ self.inverse, self.M, self.momentum, self.nesterov)
        return muon_scale(polar(X))
