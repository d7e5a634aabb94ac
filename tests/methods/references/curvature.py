"""The rivals with curvature: SOAP-Muon, KL-Shampoo and KL-SOAP, QSD, and SINGD."""

import math

import torch
from torch import Tensor

from gomuon.lab.bench.plain_loop import oas
from tests.methods.references.cut_sides import CutSide
from tests.methods.references.plain import Reference, eye, heavy_ball, lerp, muon_scale, polar
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
    """Frank–Wolfe on −⟨X, U⟩ + ½c·tr(UᵀBUA) over ‖U‖_op ≤ 1, with c = scale·lr·√max(1, m/n)."""

    def __init__(
        self,
        W: Tensor,
        lr: float = 0.08,
        *,
        momentum: float = 0.8,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        refresh_every: int = 4,
        factor_decay: float = 0.97,
        input_decay: float | None = None,
        shrinkage: str = "oas",
        scale: float = 1.0,
        steps: int = 3,
    ) -> None:
        super().__init__(W, lr, weight_decay)
        assert shrinkage == "oas"
        self.momentum, self.nesterov = momentum, nesterov
        self.refresh_every = refresh_every
        self.beta_B, self.beta_A = factor_decay, input_decay
        self.scale, self.steps = scale, steps

    def update(self, G: Tensor, x: Tensor, delta: Tensor) -> Tensor:
        if self.t % self.refresh_every == 0:
            self.A = self.averaged(self.shrunk(self.right, x), self.beta_A or 0.0, "A")
            self.B = self.averaged(self.shrunk(self.left, delta), self.beta_B, "B")
        self.M, X = lerp(G, self.M, self.momentum, self.nesterov)
        c = self.scale * self.lr * math.sqrt(max(1, self.m / self.n))
        U = torch.zeros_like(X)
        for _ in range(self.steps):
            gradient = -X + c * self.B @ U @ self.A
            towards = polar(-gradient) - U
            bend = c * float((towards * (self.B @ towards @ self.A)).sum())
            share = -float((gradient * towards).sum()) / bend if bend > 0 else 1.0
            U = U + min(max(share, 0.0), 1.0) * towards
        return muon_scale(U)

    @staticmethod
    def shrunk(side: CutSide, v: Tensor) -> Tensor:
        S = side.moment(v)
        return S if side.diagonal else side.each(lambda S: oas(S, len(v)), S)

    def averaged(self, S: Tensor, beta: float, name: str) -> Tensor:
        if self.t == 0:
            return S
        kept = beta**self.refresh_every
        old: Tensor = getattr(self, name)
        return kept * old + (1 - kept) * S


class SINGD(Reference):
    """With a bias, W is [W b] and x carries a last column of ones."""

    def __init__(
        self,
        W: Tensor,
        lr: float = 1e-3,
        *,
        momentum: float = 0.9,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        damping: float = 1e-3,
        root_rate: float = 0.01,
        root_momentum: float = 0.5,
        like_kfac: bool = False,
        normalise: bool = False,
        refresh_every: int = 10,
    ) -> None:
        super().__init__(W, lr, weight_decay)
        self.momentum, self.nesterov = momentum, nesterov
        self.damping, self.rate = damping, root_rate
        self.alpha = 0.0 if like_kfac else root_momentum
        self.like_kfac, self.normalise = like_kfac, normalise
        self.refresh_every = refresh_every
        self.C, self.K = (torch.eye(d, dtype=W.dtype) for d in W.shape)
        self.m_C, self.m_K = torch.zeros_like(self.C), torch.zeros_like(self.K)

    def update(self, G: Tensor, x: Tensor, delta: Tensor) -> Tensor:
        if self.t % self.refresh_every == 0:
            self.descend(self.right.moment(x), self.left.moment(delta))
        D = self.C @ self.C.T @ G @ self.K @ self.K.T
        self.M, U = heavy_ball(D, self.M, self.momentum, self.nesterov)
        return U

    def descend(self, A: Tensor, B: Tensor) -> None:
        C, K = self.C, self.K
        H_K, H_C = K.T @ A @ K, C.T @ B @ C
        tr_K = tr_C = damping_K = damping_C = 1.0
        if not self.like_kfac:
            tr_K, tr_C = float(H_C.trace()) / self.m, float(H_K.trace()) / self.n
            damping_K = float((C.T @ C).trace()) / self.m
            damping_C = float((K.T @ K).trace()) / self.n
        pull_K = tr_K * H_K + self.damping * damping_K * K.T @ K - eye(K)
        pull_C = tr_C * H_C + self.damping * damping_C * C.T @ C - eye(C)
        half = 0.5 * (1 - self.alpha) if self.normalise else 0.5
        self.m_K = self.alpha * self.m_K + half * pull_K
        self.m_C = self.alpha * self.m_C + half * pull_C
        self.K = K - self.step_of(self.m_K) * K @ self.m_K
        self.C = C - self.step_of(self.m_C) * C @ self.m_C

    def step_of(self, m: Tensor) -> float:
        return self.rate / max(1.0, float(m.abs().max())) if self.normalise else self.rate
