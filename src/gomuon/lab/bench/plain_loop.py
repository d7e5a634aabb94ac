"""Go-MUON as a plain loop, written from the paper's equations: one layer after another.

It uses torch and nothing of gomuon. The tests and `gomuon verify` take it as the truth that
`gomuon.GoMuon` must follow, and the benchmark as a yardstick of speed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

ADAMW: Mapping[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.0}


def second_moment(rows: Tensor) -> Tensor:
    """E[v vᵀ] of rows v [N, d]."""
    return rows.T @ rows / len(rows)


def oas(S: Tensor, N: int) -> Tensor:
    """Equations (17) and (18): a second moment S [d, d] of N rows, shrunk towards identity."""
    d = S.shape[0]
    if d == 1:
        return S  # a number has nothing to shrink to
    square, trace = torch.sum(S * S), torch.trace(S)
    above = (1 - 2 / d) * square + trace**2
    intensity = (above / ((N + 1 - 2 / d) * (square - trace**2 / d))).clamp(0, 1)
    return (1 - intensity) * S + intensity * trace / d * torch.eye(d, dtype=S.dtype)


def inverse_power(S: Tensor, power: float) -> Tensor:
    """S^(−power) of a symmetric S; eigenvalues are kept above roundoff."""
    eigenvalues, V = torch.linalg.eigh(S)
    floor = S.shape[0] * torch.finfo(S.dtype).eps * eigenvalues[-1]
    return (V * eigenvalues.clamp(min=floor) ** -power) @ V.T


def polar(X: Tensor) -> Tensor:
    U, _, Vh = torch.linalg.svd(X, full_matrices=False)
    return U @ Vh


def muon_scale(D: Tensor) -> Tensor:
    m, n = D.shape
    return math.sqrt(max(1, m / n)) * D


class MuonMatrix:
    """Muon's update of one matrix, with the exact polar factor."""

    M: Tensor

    def __init__(self, *, momentum: float = 0.8, nesterov: bool = True) -> None:
        self.beta, self.nesterov = momentum, nesterov
        self.t = 0

    def update(self, G: Tensor) -> Tensor:
        """What is subtracted from W [m, n], over the learning rate; G is its gradient."""
        if self.t == 0:
            self.M = torch.zeros_like(G)
        self.M.mul_(self.beta).add_(G, alpha=1 - self.beta)  # (30)
        source = (1 - self.beta) * G + self.beta * self.M if self.nesterov else self.M  # (31)
        self.t += 1
        return muon_scale(self.direction(source))  # (35)

    def direction(self, source: Tensor) -> Tensor:
        return polar(source)

    @property
    def refreshes(self) -> bool:
        """Whether `refresh` comes before the next update; Muon has nothing to refresh."""
        return False

    def refresh(self, x: Tensor, delta: Tensor) -> None:
        """Take note of input rows x [N, n] and output gradients δ [N, m]."""


class GoMuonMatrix(MuonMatrix):
    """The paper's "Complete update" of one matrix, Equations (27) to (35).

    The paper's settings are the defaults; the others are options of `gomuon.GoMuon`:

    Args:
        alpha: the power of both maps, or those of P_B and P_A.
        input_decay: averages A as `factor_decay` averages B; 0 does not.
        damping: added to a factor, as a share of its mean eigenvalue, instead of OAS.
        graft: whether the direction gets the Frobenius norm of a semi-orthogonal matrix.
    """

    A: Tensor
    B: Tensor
    P_A: Tensor
    P_B: Tensor

    def __init__(
        self,
        *,
        momentum: float = 0.8,
        nesterov: bool = True,
        alpha: float | tuple[float, float] = 0.25,
        refresh_every: int = 4,
        factor_decay: float = 0.97,
        input_decay: float = 0.0,
        damping: float | None = None,
        graft: bool = True,
    ) -> None:
        super().__init__(momentum=momentum, nesterov=nesterov)
        self.alpha_B, self.alpha_A = alpha if isinstance(alpha, tuple) else (alpha, alpha)
        self.K, self.damping, self.graft = refresh_every, damping, graft
        self.decay_B, self.decay_A = factor_decay**self.K, input_decay**self.K

    @property
    def refreshes(self) -> bool:
        return self.t % self.K == 0

    def refresh(self, x: Tensor, delta: Tensor) -> None:
        A, B = self.regularised(x), self.regularised(delta)  # (27)
        if self.t > 0:
            A = self.decay_A * self.A + (1 - self.decay_A) * A
            B = self.decay_B * self.B + (1 - self.decay_B) * B  # (28)
        self.A, self.B = A, B
        self.P_A = inverse_power(A, self.alpha_A)  # (29)
        self.P_B = inverse_power(B, self.alpha_B)

    def regularised(self, rows: Tensor) -> Tensor:
        S = second_moment(rows)
        if self.damping is None:
            return oas(S, len(rows))
        return S + self.damping * S.trace() / len(S) * torch.eye(len(S), dtype=S.dtype)

    def direction(self, source: Tensor) -> Tensor:
        C = self.P_B @ source @ self.P_A  # (32)
        D = self.P_B @ polar(C) @ self.P_A  # (33)
        if not self.graft:
            return D
        return D * (math.sqrt(min(D.shape)) / torch.linalg.matrix_norm(D))  # (34)


class PlainOptimizer:
    """Every `nn.Linear` weight by a matrix method of its own, everything else by AdamW.

    The loss must be a mean over the rows that a layer sees.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        make: Callable[[], MuonMatrix],
        adamw: Mapping[str, Any] = ADAMW,
    ) -> None:
        self.lr = lr
        layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
        self.matrices = {layer: make() for layer in layers}
        held = {id(layer.weight) for layer in layers}
        rest = [p for p in model.parameters() if id(p) not in held]
        self.adamw = torch.optim.AdamW(rest, **adamw) if rest else None
        self.inputs: dict[nn.Linear, Tensor] = {}
        self.output_gradients: dict[nn.Linear, Tensor] = {}
        for layer, matrix in self.matrices.items():
            if isinstance(matrix, GoMuonMatrix):
                layer.register_forward_hook(self.keep)

    def keep(self, layer: nn.Linear, args: tuple[Tensor, ...], output: Tensor) -> None:
        if self.matrices[layer].refreshes:
            self.inputs[layer] = args[0].detach().flatten(0, -2)
            output.register_hook(
                lambda g: self.output_gradients.__setitem__(layer, g.flatten(0, -2))
            )

    @torch.no_grad()
    def step(self) -> None:
        for layer, matrix in self.matrices.items():
            assert layer.weight.grad is not None
            if matrix.refreshes:
                x, g = self.inputs.pop(layer), self.output_gradients.pop(layer)
                matrix.refresh(x, len(x) * g)  # δ of one row: the loss is a mean over the rows
            layer.weight -= self.lr * matrix.update(layer.weight.grad)
        if self.adamw is not None:
            self.adamw.step()

    def zero_grad(self) -> None:
        for layer in self.matrices:
            layer.weight.grad = None
        if self.adamw is not None:
            self.adamw.zero_grad()


def plain_muon(
    model: nn.Module, lr: float, *, adamw: Mapping[str, Any] = ADAMW, **settings: Any
) -> PlainOptimizer:
    return PlainOptimizer(model, lr, lambda: MuonMatrix(**settings), adamw)


def plain_go_muon(
    model: nn.Module, lr: float, *, adamw: Mapping[str, Any] = ADAMW, **settings: Any
) -> PlainOptimizer:
    return PlainOptimizer(model, lr, lambda: GoMuonMatrix(**settings), adamw)
