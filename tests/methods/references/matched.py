"""Matched polars P_B·polar(P_B X P_A)·P_A whose maps come from gradients: Mousse, FISMO, MALT."""

import math

import torch
from torch import Tensor

from tests.methods.references.plain import Reference, eye, inverse_power, lerp, muon_scale, polar


class Mousse(Reference):
    def __init__(
        self,
        W: Tensor,
        lr: float = 0.01,
        *,
        momentum: float = 0.95,
        nesterov: bool = False,
        weight_decay: float = 0.01,
        factor_decay: float = 0.95,
        alpha: float = 0.125,
        epsilon: float = 1e-10,
        refresh_every: int = 10,
        aspect: str = "ratio",
    ) -> None:
        super().__init__(W, lr, weight_decay)
        self.momentum, self.nesterov = momentum, nesterov
        self.beta, self.alpha, self.epsilon = factor_decay, alpha, epsilon
        self.refresh_every, self.aspect = refresh_every, aspect
        self.L, self.R = (torch.zeros(d, d, dtype=W.dtype) for d in W.shape)
        self.P_L, self.P_R = eye(self.L), eye(self.R)

    def update(self, G: Tensor, x: Tensor, delta: Tensor) -> Tensor:
        self.L = self.beta * self.L + (1 - self.beta) * G @ G.T
        self.R = self.beta * self.R + (1 - self.beta) * G.T @ G
        if self.t % self.refresh_every == 0:
            self.P_L, self.P_R = self.root(self.L), self.root(self.R)
        self.M, X = lerp(G, self.M, self.momentum, self.nesterov)
        Q = polar(self.P_L @ X @ self.P_R)
        D = self.P_L @ Q @ self.P_R
        D = D * Q.norm() / D.norm()
        ratio = self.m / self.n
        return math.sqrt(max(1, ratio) if self.aspect == "max" else ratio) * D

    def root(self, S: Tensor) -> Tensor:
        if not S.any():
            return eye(S)
        S = S / (1 - self.beta ** (self.t + 1))
        S = S * len(S) / S.trace() + self.epsilon * eye(S)
        eigenvalues, V = torch.linalg.eigh(S)
        shift = max(0.0, -float(eigenvalues[0])) + self.epsilon
        return V @ torch.diag((eigenvalues + shift) ** -self.alpha) @ V.T


class FISMO(Reference):
    def __init__(
        self,
        W: Tensor,
        lr: float = 0.02,
        *,
        momentum: float = 0.95,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        factor_decay: float = 0.95,
        mu: float = 1e-3,
    ) -> None:
        super().__init__(W, lr, weight_decay)
        self.beta, self.nesterov, self.gamma, self.mu = momentum, nesterov, factor_decay, mu
        self.P, self.Q = (torch.eye(d, dtype=W.dtype) for d in W.shape)

    def update(self, G: Tensor, x: Tensor, delta: Tensor) -> Tensor:
        m, n, mu = self.m, self.n, self.mu
        L = G @ torch.linalg.inv(self.Q) @ G.T / n + mu * self.P.trace() / m * eye(self.P)
        self.P = self.normalised(self.gamma * self.P + (1 - self.gamma) * L)
        R = G.T @ torch.linalg.inv(self.P) @ G / m + mu * self.Q.trace() / n * eye(self.Q)
        self.Q = self.normalised(self.gamma * self.Q + (1 - self.gamma) * R)

        P_half, Q_half = inverse_power(self.P, 0.5), inverse_power(self.Q, 0.5)
        self.M, X = lerp(P_half @ G @ Q_half, self.M, self.beta, self.nesterov)
        return muon_scale(P_half @ polar(X) @ Q_half)

    @staticmethod
    def normalised(S: Tensor) -> Tensor:
        S = S * len(S) / S.trace()
        return (S + S.T) / 2


class MALT(Reference):
    def __init__(
        self,
        W: Tensor,
        lr: float = 0.02,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        factor_decay: float = 0.95,
        alpha: float = 0.125,
    ) -> None:
        super().__init__(W, lr, weight_decay)
        self.beta, self.nesterov, self.gamma, self.alpha = momentum, nesterov, factor_decay, alpha
        self.r, self.c = (torch.zeros(d, dtype=W.dtype) for d in W.shape)

    def update(self, G: Tensor, x: Tensor, delta: Tensor) -> Tensor:
        self.M, X = lerp(G, self.M, self.beta, self.nesterov)
        self.r = self.gamma * self.r + (1 - self.gamma) * (G**2).sum(1)
        self.c = self.gamma * self.c + (1 - self.gamma) * (G**2).sum(0)
        P_B, P_A = self.root(self.r), self.root(self.c)
        D = P_B @ polar(P_B @ X @ P_A) @ P_A
        return muon_scale(D * math.sqrt(min(self.m, self.n)) / D.norm())

    def root(self, s: Tensor) -> Tensor:
        s = s + 1e-12 * s.max() if s.any() else torch.ones_like(s)
        return torch.diag(s**-self.alpha)
