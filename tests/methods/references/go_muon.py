"""Go-MUON with its options, and Newton-Muon, which knows the inputs alone."""

import math

import torch
from torch import Tensor

from gomuon.lab.bench.plain_loop import GoMuonMatrix, oas
from tests.methods.references.cut_sides import WHOLE
from tests.methods.references.plain import Reference, eye, lerp, muon_scale, polar


class CutGoMuonMatrix(GoMuonMatrix):
    """The plain loop with factors that are cut: every block is shrunk as a factor of its own."""

    left, right = WHOLE, WHOLE

    def refresh(self, x: Tensor, delta: Tensor) -> None:
        self.sides = iter((self.right, self.left))  # in the order of the calls below
        super().refresh(x, delta)

    def regularised(self, rows: Tensor) -> Tensor:
        side = next(self.sides)
        S = side.moment(rows)
        if self.damping is not None:
            damping = self.damping
            return side.each(lambda S: S + damping * S.trace() / len(S) * eye(S), S)
        return S if side.diagonal else side.each(lambda S: oas(S, len(rows)), S)


class GoMuon(Reference):
    """The plain loop's update of one matrix, with weight decay."""

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
        self.matrix = CutGoMuonMatrix(
            momentum=momentum,
            nesterov=nesterov,
            alpha=alpha,
            refresh_every=refresh_every,
            factor_decay=factor_decay,
            input_decay=input_decay or 0.0,
            damping=shrinkage["damping"] if isinstance(shrinkage, dict) else None,
            graft=graft is not None,
        )
        self.geometry_decay = geometry_decay

    def step(self, G: Tensor, x: Tensor, delta: Tensor) -> None:
        """Decay in the step's geometry: W ← W − lr·wd·W P_A²/mean(P_A²) − lr·U."""
        if not self.geometry_decay:
            return super().step(G, x, delta)
        U = self.update(G, x, delta)
        metric = self.matrix.P_A @ self.matrix.P_A
        metric = metric / (metric.trace() / self.n)
        self.W = self.W - self.lr * self.weight_decay * self.W @ metric - self.lr * U
        self.t += 1
        return None

    def update(self, G: Tensor, x: Tensor, delta: Tensor) -> Tensor:
        self.matrix.left, self.matrix.right = self.left, self.right
        if self.matrix.refreshes:
            self.matrix.refresh(x, delta)
        return self.matrix.update(G)


class NewtonMuon(Reference):
    """zhehangdu/Newton-Muon, train_gpt_newton_muon_1.py, which has aspect "longest".

    At commit 9ab3feffc28586ba3d745a23f1a732d03c7fd139.
    """

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
        refresh_at: str = "last",
        aspect: str = "max",
    ) -> None:
        super().__init__(W, lr, weight_decay)
        self.momentum, self.nesterov, self.aspect = momentum, nesterov, aspect
        self.beta, self.damping = factor_decay, damping
        self.refresh_every, self.refresh_at = refresh_every, refresh_at
        self.K = 0.001 * torch.eye(self.n, dtype=W.dtype)
        self.inverse = eye(self.K)

    def update(self, G: Tensor, x: Tensor, delta: Tensor) -> Tensor:
        if (self.t + (self.refresh_at == "last")) % self.refresh_every == 0:
            self.K = self.beta * self.K + (1 - self.beta) * self.right.moment(x)
            self.inverse = self.right.each(self.inverted, self.K)
        self.M, X = lerp(G @ self.inverse, self.M, self.momentum, self.nesterov)
        O = polar(X)
        return math.sqrt(max(self.m, self.n)) * O if self.aspect == "longest" else muon_scale(O)

    def inverted(self, K: Tensor) -> Tensor:
        ridge = self.damping * K.trace() / len(K) + 1e-8
        return torch.linalg.inv(K + ridge * eye(K))
