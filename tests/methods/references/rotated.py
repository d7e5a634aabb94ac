"""The two that read L = E[GGᵀ] and R = E[GᵀG] and take no polar: Shampoo and SOAP."""

import math

import torch
from torch import Tensor

from tests.methods.references.plain import Reference, eye, heavy_ball, inverse_power


class Shampoo(Reference):
    """One block; larger matrices are cut into several of these.

    google-research/google-research, scalable_shampoo/optax/distributed_shampoo.py at
    e19012986e44d086bd033cd9ac5c8f95596226f2; facebookresearch/optimizers, distributed_shampoo/ at
    b91f46b4045d9fb251d3a6c60a9c1f0fc9f3b032; the original: Gupta et al. 2018, Algorithm 1, with the
    numbers of tensorflow/contrib/opt/python/training/shampoo.py at
    0771f37819c1077067340febad5a0d3abe8e561b.
    """

    def __init__(
        self,
        W: Tensor,
        lr: float = 1e-3,
        *,
        momentum: float = 0.9,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        gradient_decay: float = 0.0,
        bias_correction: bool = False,
        factor_decay: float = 0.999,
        start: float = 0.0,
        ridge: float = 1e-6,
        epsilon: float = 0.0,
        power: float = 0.25,
        graft: str | None = "rmsprop",
        statistics_every: int = 1,
        refresh_every: int = 10,
        refresh_at: str = "first",
    ) -> None:
        super().__init__(W, lr, weight_decay)
        self.momentum, self.nesterov = momentum, nesterov
        self.beta_1, self.corrects = gradient_decay, bias_correction
        self.beta, self.ridge, self.epsilon = factor_decay, ridge, epsilon
        self.power, self.graft = power, graft
        self.statistics_every, self.refresh_every = statistics_every, refresh_every
        self.ahead = int(refresh_at == "last")
        self.L, self.R = (start * torch.eye(d, dtype=W.dtype) for d in W.shape)
        self.observations = 0
        self.P_L: Tensor | None = None
        self.P_R: Tensor | None = None
        self.s, self.F = torch.zeros_like(W), torch.zeros_like(W)

    def update(self, G: Tensor, x: Tensor, delta: Tensor) -> Tensor:
        D, step = self.directions(G)
        if step is not None:
            D = self.at_length(D, D.norm(), step.norm()) if self.P_L is not None else step
        return self.with_momentum(D)

    def directions(self, G: Tensor) -> tuple[Tensor, Tensor | None]:
        """P_L F P_R, and the step of the rule that it is grafted to."""
        if (self.t + self.ahead) % self.statistics_every == 0:
            weight = 1.0 if self.beta == 1 else 1 - self.beta
            self.L = self.beta * self.L + weight * G @ G.T
            self.R = self.beta * self.R + weight * G.T @ G
            self.observations += 1
        if (self.t + self.ahead) % self.refresh_every == 0:
            self.P_L, self.P_R = self.root(self.L), self.root(self.R)
        self.F = self.beta_1 * self.F + (1 - self.beta_1) * G
        X = self.F / self.correction(self.beta_1, self.t + 1)
        D = X if self.P_L is None or self.P_R is None else self.P_L @ X @ self.P_R
        return D, None if self.graft is None else self.rule(G, X)

    def with_momentum(self, D: Tensor) -> Tensor:
        self.M, U = heavy_ball(D, self.M, self.momentum, self.nesterov)
        return U

    @staticmethod
    def at_length(D: Tensor, own: Tensor, wanted: Tensor) -> Tensor:
        return D * float(wanted) / float(own) if float(own) else D

    def correction(self, beta: float, times: int) -> float:
        return 1 - beta**times if self.corrects and beta < 1 else 1.0

    def root(self, S: Tensor) -> Tensor:
        if not S.any():
            return eye(S)
        S = S / self.correction(self.beta, self.observations)
        largest = torch.linalg.eigvalsh(S)[-1]
        return inverse_power(S + (self.ridge * largest + self.epsilon) * eye(S), self.power)

    def rule(self, G: Tensor, X: Tensor) -> Tensor:
        """The step of the rule whose length the direction is given."""
        if self.graft == "sgd":
            return X
        beta = 1.0 if self.graft == "adagrad" else self.beta
        self.s = beta * self.s + (1.0 if beta == 1 else 1 - beta) * G**2
        return X / ((self.s / self.correction(beta, self.t + 1)).sqrt() + 1e-10)


def graft_as_a_whole(blocks: list[Shampoo], gradients: list[Tensor]) -> None:
    """One step of the blocks of a matrix; their common length is grafted."""
    pairs = [block.directions(G) for block, G in zip(blocks, gradients, strict=True)]
    steps = [step for _, step in pairs if step is not None]
    own = torch.stack([D.norm() for D, _ in pairs]).norm()
    wanted = torch.stack([step.norm() for step in steps]).norm()
    for block, (D, _) in zip(blocks, pairs, strict=True):
        U = block.with_momentum(block.at_length(D, own, wanted))
        block.W = (1 - block.lr * block.weight_decay) * block.W - block.lr * U
        block.t += 1


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
