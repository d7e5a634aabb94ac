"""The rivals with curvature: SOAP-Muon, KL-Shampoo and KL-SOAP, QSD, and SINGD."""

import math

import torch
from torch import Tensor

from tests.methods.references.plain import Reference, eye, lerp, muon_scale, polar
from tests.methods.references.rotated import SOAP


class SOAPMuon(SOAP):
    def __init__(
        self,
        W: Tensor,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.95, 0.98),
        eps: float = 1e-15,
        weight_decay: float = 0.0,
        factor_decay: float = 0.98,
        refresh_every: int = 10,
        max_side: int = 10000,
        square_root: bool = False,
    ) -> None:
        super().__init__(
            W,
            lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            factor_decay=factor_decay,
            refresh_every=refresh_every,
            max_side=max_side,
        )
        self.square_root = square_root

    def update(self, G: Tensor, x: Tensor, delta: Tensor) -> Tensor:
        beta_1, beta_2 = self.betas
        self.M = beta_1 * self.M + (1 - beta_1) * G
        self.v = beta_2 * self.v + (1 - beta_2) * (self.Q_L.T @ G @ self.Q_R) ** 2
        U = polar((self.Q_L.T @ self.M @ self.Q_R) / (self.v.sqrt() + self.eps))
        if self.square_root:
            U = torch.sign(U) * U.abs() ** 0.5
        D = self.Q_L @ U @ self.Q_R.T
        D = D / (D**2).mean().sqrt()
        return D * math.sqrt(1 - beta_2**self.t) / (1 - beta_1**self.t)


class KL(Reference):
    """What KL-Shampoo and KL-SOAP share: L, R, their bases and their eigenvalues."""

    def __init__(
        self,
        W: Tensor,
        lr: float,
        weight_decay: float,
        eps: float,
        factor_decay: float,
        refresh_every: int,
        max_side: int,
        first_values: float,
        clamp: float | None,
    ) -> None:
        super().__init__(W, lr, weight_decay)
        self.eps, self.beta, self.refresh_every = eps, factor_decay, refresh_every
        self.max_side, self.clamp = max_side, clamp
        self.L, self.R = (torch.zeros(d, d, dtype=W.dtype) for d in W.shape)
        self.Q_L, self.Q_R = eye(self.L), eye(self.R)
        self.values_L, self.values_R = (torch.ones(d, dtype=W.dtype) for d in W.shape)
        self.v = torch.zeros_like(W)
        if self.m <= max_side:
            self.values_L = first_values * self.values_L
        if self.n <= max_side:
            self.values_R = first_values * self.values_R

    def step(self, G: Tensor, x: Tensor, delta: Tensor) -> None:
        """The first step only makes the bases, of plain Grams."""
        left, right = self.m <= self.max_side, self.n <= self.max_side
        if self.t == 0:
            self.L = (1 - self.beta) * G @ G.T / self.n
            self.R = (1 - self.beta) * G.T @ G / self.m
            if left:
                self.Q_L = torch.linalg.eigh(self.L)[1].flip(1)
            if right:
                self.Q_R = torch.linalg.eigh(self.R)[1].flip(1)
        else:
            self.W = self.W - self.lr * self.update(G, x, delta)
            self.W = (1 - self.lr * self.weight_decay) * self.W  # after the update
            self.couple(G, left, right)
            if self.t % self.refresh_every == 0:
                if left:
                    self.Q_L = torch.linalg.qr(self.L @ self.Q_L)[0]
                if right:
                    self.Q_R = torch.linalg.qr(self.R @ self.Q_R)[0]
        self.t += 1

    def couple(self, G: Tensor, left: bool, right: bool) -> None:
        """L ← βL + (1−β)G R⁻¹Gᵀ/n and R alike, with the inverses of before; eigenvalues too."""
        inverse_L = self.Q_L @ torch.diag(1 / self.values_L) @ self.Q_L.T
        inverse_R = self.Q_R @ torch.diag(1 / self.values_R) @ self.Q_R.T
        new_L, new_R = G @ inverse_R @ G.T / self.n, G.T @ inverse_L @ G / self.m
        self.L = self.beta * self.L + (1 - self.beta) * new_L
        self.R = self.beta * self.R + (1 - self.beta) * new_R
        if left:
            self.values_L = self.averaged(self.values_L, self.Q_L.T @ new_L @ self.Q_L)
        if right:
            self.values_R = self.averaged(self.values_R, self.Q_R.T @ new_R @ self.Q_R)

    def averaged(self, values: Tensor, S: Tensor) -> Tensor:
        values = self.beta * values + (1 - self.beta) * S.diagonal()
        if self.clamp is None:
            return values
        return values.clamp(min=1 / max(10, min(len(S), self.clamp)) ** 2)


class KLShampoo(KL):
    def __init__(
        self,
        W: Tensor,
        lr: float = 1e-4,
        *,
        momentum: float = 0.9,
        nesterov: bool = False,
        weight_decay: float = 0.01,
        eps: float = 1e-8,
        factor_decay: float = 0.98,
        refresh_every: int = 10,
        max_side: int = 10000,
        first_values: float = 0.1,
        clamp: float | None = 4000.0,
    ) -> None:
        super().__init__(
            W, lr, weight_decay, eps, factor_decay, refresh_every, max_side, first_values, clamp
        )
        self.momentum, self.nesterov = momentum, nesterov

    def update(self, G: Tensor, x: Tensor, delta: Tensor) -> Tensor:
        self.M, X = lerp(G, self.M, self.momentum, self.nesterov)
        denominator = torch.outer(self.values_L, self.values_R).sqrt() + self.eps
        return self.Q_L @ ((self.Q_L.T @ X @ self.Q_R) / denominator) @ self.Q_R.T


class KLSOAP(KL):
    def __init__(
        self,
        W: Tensor,
        lr: float = 1e-4,
        *,
        betas: tuple[float, float] = (0.9, 0.98),
        weight_decay: float = 0.01,
        eps: float = 1e-8,
        factor_decay: float = 0.98,
        refresh_every: int = 10,
        max_side: int = 10000,
        first_values: float = 0.1,
        clamp: float | None = 4000.0,
    ) -> None:
        super().__init__(
            W, lr, weight_decay, eps, factor_decay, refresh_every, max_side, first_values, clamp
        )
        self.betas = betas

    def update(self, G: Tensor, x: Tensor, delta: Tensor) -> Tensor:
        beta_1, beta_2 = self.betas
        self.M = beta_1 * self.M + (1 - beta_1) * G
        self.v = beta_2 * self.v + (1 - beta_2) * (self.Q_L.T @ G @ self.Q_R) ** 2
        N = (self.Q_L.T @ self.M @ self.Q_R) / (self.v.sqrt() + self.eps)
        return self.Q_L @ N @ self.Q_R.T


class QSD(Reference):
    pass


class SINGD(Reference):
    pass
