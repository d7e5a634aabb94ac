"""Go-MUON as a straightforward script: layer after layer, nothing batched or shared.

A yardstick for speed; it takes the same steps as `gomuon.GoMuon`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

ADAMW: Mapping[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.0}


def oas(S: Tensor, rows: int) -> Tensor:
    """Equations (17) and (18)."""
    d = S.shape[0]
    square, trace = torch.sum(S * S), torch.trace(S)
    above = (1 - 2 / d) * square + trace**2
    intensity = (above / ((rows + 1 - 2 / d) * (square - trace**2 / d))).clamp(0, 1)
    return (1 - intensity) * S + intensity * trace / d * torch.eye(d, dtype=S.dtype)


def inverse_root(S: Tensor, power: float) -> Tensor:
    eigenvalues, V = torch.linalg.eigh(S)
    floor = S.shape[0] * torch.finfo(S.dtype).eps * eigenvalues[-1]
    return (V * eigenvalues.clamp(min=floor) ** -power) @ V.T


def polar(X: Tensor) -> Tensor:
    U, _, Vh = torch.linalg.svd(X, full_matrices=False)
    return U @ Vh


class PlainMuon:
    """Muon with the exact polar factor for every `nn.Linear`, AdamW for everything else."""

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        *,
        momentum: float = 0.8,
        adamw: Mapping[str, Any] = ADAMW,
    ) -> None:
        self.lr, self.beta = lr, momentum
        self.layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
        held = {id(layer.weight) for layer in self.layers}
        rest = [p for p in model.parameters() if id(p) not in held]
        self.adamw = torch.optim.AdamW(rest, **adamw) if rest else None
        self.M = {layer: torch.zeros_like(layer.weight) for layer in self.layers}
        self.t = 0

    @torch.no_grad()
    def step(self) -> None:
        for layer in self.layers:
            G, M, beta = layer.weight.grad, self.M[layer], self.beta
            assert G is not None
            M.mul_(beta).add_(G, alpha=1 - beta)
            D = self.direction(layer, (1 - beta) * G + beta * M)
            m, n = D.shape
            layer.weight -= self.lr * math.sqrt(max(1, m / n)) * D
        if self.adamw is not None:
            self.adamw.step()
        self.t += 1

    def direction(self, layer: nn.Linear, source: Tensor) -> Tensor:
        return polar(source)

    def zero_grad(self) -> None:
        for layer in self.layers:
            layer.weight.grad = None
        if self.adamw is not None:
            self.adamw.zero_grad()


class PlainGoMuon(PlainMuon):
    """The paper's "Complete update" for every `nn.Linear`, under a mean loss."""

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        *,
        refresh_every: int = 4,
        factor_decay: float = 0.97,
        alpha: float = 0.25,
        momentum: float = 0.8,
        adamw: Mapping[str, Any] = ADAMW,
    ) -> None:
        super().__init__(model, lr, momentum=momentum, adamw=adamw)
        self.K, self.alpha, self.decay = refresh_every, alpha, factor_decay**refresh_every
        self.x: dict[nn.Linear, Tensor] = {}
        self.delta: dict[nn.Linear, Tensor] = {}
        self.B: dict[nn.Linear, Tensor] = {}
        self.maps: dict[nn.Linear, tuple[Tensor, Tensor]] = {}
        for layer in self.layers:
            layer.register_forward_hook(self.keep)

    def keep(self, layer: nn.Linear, args: tuple[Tensor, ...], output: Tensor) -> None:
        if self.t % self.K == 0:
            self.x[layer] = args[0].detach().flatten(0, -2)
            output.register_hook(lambda g: self.delta.__setitem__(layer, g.flatten(0, -2)))

    def direction(self, layer: nn.Linear, source: Tensor) -> Tensor:
        if self.t % self.K == 0:
            self.refresh(layer)
        left, right = self.maps[layer]
        D = left @ polar(left @ source @ right) @ right
        return D * (math.sqrt(min(D.shape)) / torch.linalg.matrix_norm(D))

    def refresh(self, layer: nn.Linear) -> None:
        x, g = self.x.pop(layer), self.delta.pop(layer)
        rows = len(x)
        delta = rows * g  # the loss is a mean over the rows
        A, B = oas(x.T @ x / rows, rows), oas(delta.T @ delta / rows, rows)
        if layer in self.B:
            B = self.decay * self.B[layer] + (1 - self.decay) * B
        self.B[layer] = B
        self.maps[layer] = inverse_root(B, self.alpha), inverse_root(A, self.alpha)
