"""The two that read L = E[GGᵀ] and R = E[GᵀG] and take no polar: Shampoo and SOAP."""

import math

import torch
from torch import Tensor

from tests.methods.references.plain import Reference, eye, heavy_ball, inverse_power


class Shampoo(Reference):
    """One block; larger matrices are cut into several of these."""

    def __init__(
        self,
        W: Tensor,
        lr: float = 1e-3,
        *,
        momentum: float = 0.9,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        factor_decay: float = 0.999,
        ridge: float = 1e-6,
        power: float = 0.25,
        graft: str | None = "rmsprop",
        statistics_every: int = 1,
        refresh_every: int = 10,
    ) -> None:
        super().__init__(W, lr, weight_decay)
        self.momentum, self.nesterov = momentum, nesterov
        self.beta, self.ridge, self.power, self.graft = factor_decay, ridge, power, graft
        self.statistics_every, self.refresh_every = statistics_every, refresh_every
        self.L, self.R = (torch.zeros(d, d, dtype=W.dtype) for d in W.shape)
        self.P_L, self.P_R = eye(self.L), eye(self.R)
        self.s = torch.zeros_like(W)

    def update(self, G: Tensor, x: Tensor, delta: Tensor) -> Tensor:
        if self.t % self.statistics_every == 0:
            weight = 1.0 if self.beta == 1 else 1 - self.beta
            self.L = self.beta * self.L + weight * G @ G.T
            self.R = self.beta * self.R + weight * G.T @ G
        if self.t % self.refresh_every == 0:
            self.P_L, self.P_R = self.root(self.L), self.root(self.R)
        D = self.P_L @ G @ self.P_R
        if self.graft is not None:
            norm = float(D.norm())
            D = D * float(self.rule(G).norm()) / norm if norm else D
        self.M, U = heavy_ball(D, self.M, self.momentum, self.nesterov)
        return U

    def root(self, S: Tensor) -> Tensor:
        largest = torch.linalg.eigvalsh(S)[-1]
        return inverse_power(S + self.ridge * largest * eye(S), self.power) if S.any() else eye(S)

    def rule(self, G: Tensor) -> Tensor:
        """The step of the rule whose length the direction is given."""
        if self.graft == "sgd":
            return G
        if self.graft == "adagrad":
            self.s = self.s + G**2
        else:
            self.s = 0.999 * self.s + 0.001 * G**2
        return G / (self.s.sqrt() + 1e-10)


class SOAP(Reference):
    def __init__(
        self,
        W: Tensor,
        lr: float = 3e-3,
        *,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        factor_decay: float = 0.95,
        refresh_every: int = 10,
        max_side: int = 10000,
    ) -> None:
        super().__init__(W, lr, weight_decay)
        self.betas, self.eps, self.beta = betas, eps, factor_decay
        self.refresh_every, self.max_side = refresh_every, max_side
        self.L, self.R = (torch.zeros(d, d, dtype=W.dtype) for d in W.shape)
        self.Q_L, self.Q_R = eye(self.L), eye(self.R)
        self.v = torch.zeros_like(W)

    def step(self, G: Tensor, x: Tensor, delta: Tensor) -> None:
        """The first step only makes the bases."""
        if self.t == 0:
            self.average(G)
            self.Q_L, self.Q_R = self.eigenvectors(self.L), self.eigenvectors(self.R)
        else:
            self.W = self.W - self.lr * self.update(G, x, delta)
            self.W = (1 - self.lr * self.weight_decay) * self.W  # after the update
            self.average(G)
            if self.t % self.refresh_every == 0:
                self.rotate()
        self.t += 1

    def update(self, G: Tensor, x: Tensor, delta: Tensor) -> Tensor:
        beta_1, beta_2 = self.betas
        G_rotated = self.Q_L.T @ G @ self.Q_R
        self.M = beta_1 * self.M + (1 - beta_1) * G
        self.v = beta_2 * self.v + (1 - beta_2) * G_rotated**2
        N = (self.Q_L.T @ self.M @ self.Q_R) / (self.v.sqrt() + self.eps)
        correction = math.sqrt(1 - beta_2**self.t) / (1 - beta_1**self.t)
        return correction * self.Q_L @ N @ self.Q_R.T

    def average(self, G: Tensor) -> None:
        self.L = self.beta * self.L + (1 - self.beta) * G @ G.T
        self.R = self.beta * self.R + (1 - self.beta) * G.T @ G

    def eigenvectors(self, S: Tensor) -> Tensor:
        return eye(S) if len(S) > self.max_side else torch.linalg.eigh(S)[1].flip(1)

    def rotate(self) -> None:
        """One power step and a QR; the second moment follows the order of the columns."""
        if self.m <= self.max_side:
            order = (self.Q_L.T @ self.L @ self.Q_L).diagonal().argsort(descending=True)
            self.v = self.v[order]
            self.Q_L = torch.linalg.qr(self.L @ self.Q_L[:, order])[0]
        if self.n <= self.max_side:
            order = (self.Q_R.T @ self.R @ self.Q_R).diagonal().argsort(descending=True)
            self.v = self.v[:, order]
            self.Q_R = torch.linalg.qr(self.R @ self.Q_R[:, order])[0]
