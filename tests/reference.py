"""Go-MUON written straight from the paper's equations: a loop, float64, no batching, no cleverness.

Nothing of gomuon is used. The optimizer is compared with this.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn


def oas(S: Tensor, N: int) -> Tensor:
    """Equations (17) and (18)."""
    d = S.shape[0]
    tr_S2, tr_S = float((S @ S).trace()), float(S.trace())
    intensity = ((1 - 2 / d) * tr_S2 + tr_S**2) / ((N + 1 - 2 / d) * (tr_S2 - tr_S**2 / d))
    intensity = min(max(intensity, 0.0), 1.0)
    return (1 - intensity) * S + intensity * tr_S / d * torch.eye(d, dtype=S.dtype)


def inverse_power(S: Tensor, alpha: float) -> Tensor:
    eigenvalues, V = torch.linalg.eigh(S)
    floor = S.shape[0] * torch.finfo(S.dtype).eps * eigenvalues.max()
    return V @ torch.diag(eigenvalues.clamp(min=floor) ** -alpha) @ V.T


def polar(C: Tensor) -> Tensor:
    U, _, Vh = torch.linalg.svd(C, full_matrices=False)
    return U @ Vh


class Reference:
    """The "Complete update" for the linear layers of a model, AdamW for everything else."""

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float,
        adamw_lr: float,
        momentum: float = 0.8,
        alpha: float = 0.25,
        K: int = 4,
        beta_B: float = 0.97,
    ) -> None:
        self.lr, self.adamw_lr, self.beta = lr, adamw_lr, momentum
        self.alpha, self.K, self.beta_B = alpha, K, beta_B
        self.linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
        matrices = {id(module.weight) for module in self.linears}
        self.adamw = torch.optim.AdamW(
            [p for p in model.parameters() if id(p) not in matrices],
            lr=adamw_lr,
            betas=(0.9, 0.95),
            weight_decay=0.0,
        )
        self.t = 0
        self.M = {module: torch.zeros_like(module.weight) for module in self.linears}
        self.B_bar: dict[nn.Module, Tensor] = {}
        self.P_A: dict[nn.Module, Tensor] = {}
        self.P_B: dict[nn.Module, Tensor] = {}

    def step(self, compute_loss: Callable[[], Tensor], schedule: float = 1.0) -> float:
        """One update at `schedule` times the peak learning rates."""
        inputs: dict[nn.Module, Tensor] = {}
        outputs: dict[nn.Module, Tensor] = {}

        def remember(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            inputs[module], outputs[module] = args[0].detach(), output
            output.retain_grad()

        handles = [module.register_forward_hook(remember) for module in self.linears]
        loss = compute_loss()
        self.adamw.zero_grad()
        for module in self.linears:
            module.weight.grad = None
        loss.backward()
        for handle in handles:
            handle.remove()

        with torch.no_grad():
            for module in self.linears:
                self._update(module, inputs[module], outputs[module].grad, schedule * self.lr)
        self.adamw.param_groups[0]["lr"] = schedule * self.adamw_lr
        self.adamw.step()
        self.t += 1
        return loss.item()

    def _update(self, module: nn.Linear, x: Tensor, g: Tensor | None, lr: float) -> None:
        assert g is not None
        assert module.weight.grad is not None
        if self.t % self.K == 0:
            x = x.reshape(-1, x.shape[-1])
            N = len(x)
            delta = N * g.reshape(N, -1)  # the loss is a mean over the N rows
            A_hat = sum(torch.outer(row, row) for row in x) / N
            B_hat = sum(torch.outer(row, row) for row in delta) / N
            assert isinstance(A_hat, Tensor)
            assert isinstance(B_hat, Tensor)
            A, B = oas(A_hat, N), oas(B_hat, N)
            if module in self.B_bar:
                decay = self.beta_B**self.K
                self.B_bar[module] = decay * self.B_bar[module] + (1 - decay) * B
            else:
                self.B_bar[module] = B
            self.P_A[module] = inverse_power(A, self.alpha)
            self.P_B[module] = inverse_power(self.B_bar[module], self.alpha)

        P_A, P_B, G, beta = self.P_A[module], self.P_B[module], module.weight.grad, self.beta
        self.M[module] = beta * self.M[module] + (1 - beta) * G
        M_hat = (1 - beta) * G + beta * self.M[module]
        C = P_B @ M_hat @ P_A
        D_0 = P_B @ polar(C) @ P_A
        m, n = D_0.shape
        D = D_0 * math.sqrt(min(m, n)) / torch.linalg.matrix_norm(D_0)
        module.weight -= lr * math.sqrt(max(1, m / n)) * D
