"""Muon with five float32 Newton–Schulz steps on stacks of equal shapes: a baseline for speed."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def newton_schulz(X: Tensor, steps: int = 5) -> Tensor:
    """X [b, m, n] with its singular values pushed towards one: X ← aX + b(XXᵀ)X + c(XXᵀ)²X."""
    a, b, c = COEFFICIENTS
    tall = X.shape[-2] > X.shape[-1]
    X = X.mT if tall else X
    X = X / torch.linalg.matrix_norm(X, keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        S = X @ X.mT
        X = torch.baddbmm(X, torch.baddbmm(S, S, S, beta=b, alpha=c), X, beta=a)
    return X.mT if tall else X


class NewtonSchulzMuon(torch.optim.Optimizer):
    """Muon with Nesterov momentum; parameters of more than two dimensions are flattened."""

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float = 0.8) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            stacks: dict[torch.Size, list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    stacks.setdefault(parameter.flatten(1).shape, []).append(parameter)
            for (m, n), stack in stacks.items():
                # The momentum of a stack is one tensor, stored with the first parameter.
                state, beta = self.state[stack[0]], group["momentum"]
                G = torch.stack([p.grad.flatten(1) for p in stack if p.grad is not None])
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(G)
                M = state["momentum"].lerp_(G, 1 - beta)
                D = newton_schulz(G.lerp(M, beta))
                updates = [U.reshape(p.shape) for U, p in zip(D, stack, strict=True)]
                torch._foreach_add_(stack, updates, alpha=-group["lr"] * math.sqrt(max(1, m / n)))
