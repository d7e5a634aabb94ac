"""Muon's younger relatives: other lengths, second moments after the polar factor, low rank."""

import math
from typing import Any

import torch
from torch import Tensor

from tests.methods.references.plain import Reference, heavy_ball, lerp, muon_scale, polar


class Moonlight(Reference):
    def __init__(
        self,
        W: Tensor,
        lr: float = 1e-3,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__(W, lr, weight_decay)
        self.beta, self.nesterov = momentum, nesterov

    def update(self, G: Tensor, x: Tensor, delta: Tensor) -> Tensor:
        self.M, X = heavy_ball(G, self.M, self.beta, self.nesterov)
        return 0.2 * math.sqrt(max(self.m, self.n)) * polar(X)


class NorMuon(Reference):
    def __init__(
        self,
        W: Tensor,
        lr: float = 0.02,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        square_decay: float = 0.95,
    ) -> None:
        super().__init__(W, lr, weight_decay)
        self.beta, self.nesterov, self.beta_2 = momentum, nesterov, square_decay
        self.v = torch.zeros_like(W[:, :1])

    def update(self, G: Tensor, x: Tensor, delta: Tensor) -> Tensor:
        self.M, X = lerp(G, self.M, self.beta, self.nesterov)
        O = polar(X)
        self.v = self.beta_2 * self.v + (1 - self.beta_2) * (O**2).mean(1, keepdim=True)
        D = O / (self.v.sqrt() + 1e-10)
        return muon_scale(D * O.norm() / (D.norm() + 1e-10))


class AdaMuon(Reference):
    def __init__(
        self,
        W: Tensor,
        lr: float = 0.02,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.01,
        sign: bool = True,
        square_decay: float = 0.999,
        eps: float = 1e-8,
    ) -> None:
        super().__init__(W, lr, weight_decay)
        self.beta, self.nesterov, self.sign = momentum, nesterov, sign
        self.beta_2, self.eps = square_decay, eps
        self.v = torch.zeros_like(W)

    def update(self, G: Tensor, x: Tensor, delta: Tensor) -> Tensor:
        self.M, X = lerp(G, self.M, self.beta, self.nesterov)
        O = _partial_polar(torch.sign(X)) if self.sign else polar(X)
        self.v = self.beta_2 * self.v + (1 - self.beta_2) * O**2
        corrected = self.v / (1 - self.beta_2 ** (self.t + 1))
        D = O / (corrected.sqrt() + self.eps)
        return 0.2 * math.sqrt(self.m * self.n) * D / D.norm()


def _partial_polar(X: Tensor) -> Tensor:
    """A matrix of signs is often singular: its null space stays zero."""
    U, sigma, Vh = torch.linalg.svd(X, full_matrices=False)
    return (U * (sigma > 1e-10 * sigma[0])) @ Vh


class PolarExpressMuon(Reference):
    # Minimax-optimal quintics for [1e-3, 1], as published.
    QUINTICS = (
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
        (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
        (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    )

    def __init__(
        self,
        W: Tensor,
        lr: float = 0.02,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        polar_steps: int = 5,
    ) -> None:
        super().__init__(W, lr, weight_decay)
        self.beta, self.nesterov, self.polar_steps = momentum, nesterov, polar_steps

    def update(self, G: Tensor, x: Tensor, delta: Tensor) -> Tensor:
        self.M, X = lerp(G, self.M, self.beta, self.nesterov)
        Y = X / (1.01 * X.norm() + 1e-7)
        for step in range(self.polar_steps):
            if step < len(self.QUINTICS):
                a, b, c = self.QUINTICS[step]
                a, b, c = a / 1.01, b / 1.01**3, c / 1.01**5
            else:
                a, b, c = 15 / 8, -5 / 4, 3 / 8
            Y = a * Y + b * Y @ Y.T @ Y + c * Y @ Y.T @ Y @ Y.T @ Y
        return muon_scale(Y)


class SAMuon(Reference):
    def __init__(
        self,
        W: Tensor,
        lr: float = 0.02,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        gamma: float = 0.5,
    ) -> None:
        super().__init__(W, lr, weight_decay)
        self.beta, self.nesterov, self.gamma = momentum, nesterov, gamma

    def update(self, G: Tensor, x: Tensor, delta: Tensor) -> Tensor:
        self.M, X = lerp(G, self.M, self.beta, self.nesterov)
        U, _, Vh = torch.linalg.svd(X, full_matrices=False)
        lengths = torch.full((len(Vh),), self.gamma, dtype=X.dtype)
        lengths[0] = 1.0
        return muon_scale(U @ torch.diag(lengths) @ Vh)


class MuonHyperball(Reference):
    def __init__(
        self, W: Tensor, lr: float = 0.01, *, momentum: float = 0.95, nesterov: bool = False
    ) -> None:
        super().__init__(W, lr)
        self.beta, self.nesterov, self.radius = momentum, nesterov, W.norm()

    def step(self, G: Tensor, x: Tensor, delta: Tensor) -> None:
        """The step itself is another one: both norms are set."""
        u = self.update(G, x, delta)
        self.W = self.W - self.lr * self.radius * u / u.norm()
        self.W = self.radius * self.W / self.W.norm()
        self.t += 1

    def update(self, G: Tensor, x: Tensor, delta: Tensor) -> Tensor:
        self.M, X = heavy_ball(G, self.M, self.beta, self.nesterov)
        return polar(X)


class Dion(Reference):
    def __init__(
        self,
        W: Tensor,
        lr: float = 0.01,
        *,
        momentum: float = 0.95,
        weight_decay: float = 0.01,
        rank_fraction: float = 1.0,
        eps: float = 1e-8,
    ) -> None:
        super().__init__(W, lr, weight_decay)
        self.mu, self.eps = momentum, eps
        self.Q = _fixed_numbers(self.n, max(1, int(rank_fraction * min(self.m, self.n))))

    def update(self, G: Tensor, x: Tensor, delta: Tensor) -> Tensor:
        B = self.M + G
        P, _ = torch.linalg.qr(B @ self.Q)
        R = B.T @ P
        self.M = B - (1 - self.mu) * P @ R.T
        self.Q = R / (R.norm(dim=0) + self.eps)
        return math.sqrt(self.m / self.n) * P @ self.Q.T


def _fixed_numbers(rows: int, columns: int) -> Tensor:
    """The first Q: numbers 65539·i + j, squared four times modulo a prime, as columns of length 1.

    Any Q is as good; it must only be the same one.
    """
    numbers = []
    for i in range(1, rows + 1):
        for j in range(1, columns + 1):
            number = 65539 * i + j
            for _ in range(4):
                number = (number * number + 7) % (2**31 - 1)
            numbers.append(number / (2**31 - 1) - 0.5)
    Q = torch.tensor(numbers, dtype=torch.float64).reshape(rows, columns)
    return Q / Q.norm(dim=0)


class ModularNorm(Reference):
    """`dual` of a linear layer; the others stand beside it."""

    def __init__(
        self,
        W: Tensor,
        lr: float = 0.1,
        *,
        momentum: float = 0.95,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        mass: float = 1.0,
        total_mass: float = 1.0,
    ) -> None:
        super().__init__(W, lr, weight_decay)
        self.beta, self.nesterov, self.share = momentum, nesterov, mass / total_mass

    def update(self, G: Tensor, x: Tensor, delta: Tensor) -> Tensor:
        self.M, X = lerp(G, self.M, self.beta, self.nesterov)
        return self.share * self.dual(X)

    def dual(self, X: Tensor) -> Tensor:
        return math.sqrt(self.m / self.n) * polar(X)


class ModularEmbedding(ModularNorm):
    """Rows are embeddings."""

    def dual(self, X: Tensor) -> Tensor:
        rows = [row / row.norm() if row.any() else row for row in X]
        return math.sqrt(self.n) * torch.stack(rows)


class ModularConvolution(ModularNorm):
    """W [outputs, inputs, height, width], flattened by the caller to outputs × the rest."""

    def __init__(self, W: Tensor, inputs: int, **settings: Any) -> None:
        super().__init__(W, **settings)
        self.inputs = inputs

    def dual(self, X: Tensor) -> Tensor:
        kernel = X.reshape(self.m, self.inputs, -1)
        result = torch.zeros_like(kernel)
        places = kernel.shape[-1]
        for place in range(places):
            O = polar(kernel[:, :, place])
            result[:, :, place] = math.sqrt(self.m / self.inputs) / places * O
        return result.reshape(self.m, -1)


class Gluon(Reference):
    def __init__(
        self,
        W: Tensor,
        lr: float = 0.02,
        *,
        momentum: float = 0.95,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        measure_steps: int = 100,
        largest_radius: float = 10.0,
    ) -> None:
        super().__init__(W, lr, weight_decay)
        self.beta, self.nesterov = momentum, nesterov
        self.measure_steps, self.largest = measure_steps, largest_radius
        self.last = torch.zeros_like(W)
        self.pairs: list[tuple[float, float]] = []

    def update(self, G: Tensor, x: Tensor, delta: Tensor) -> Tensor:
        self.M, X = lerp(G, self.M, self.beta, self.nesterov)
        norm = float(torch.linalg.matrix_norm(X, "nuc"))
        if 0 < self.t <= self.measure_steps:
            change = float(torch.linalg.matrix_norm(G - self.last, "nuc"))
            self.pairs.append((norm, change))
        self.last = G
        radius = 1.0
        if self.t >= max(1, self.measure_steps) and self.pairs:
            L_0, L_1 = self.line()
            radius = min(self.largest, norm / (L_0 + L_1 * norm))
        return radius * math.sqrt(self.m / self.n) * polar(X)

    def line(self) -> tuple[float, float]:
        """Least squares with neither constant below zero."""
        xs = torch.tensor([x for x, _ in self.pairs], dtype=torch.float64)
        ys = torch.tensor([y for _, y in self.pairs], dtype=torch.float64)
        x, y, spread = xs.mean(), ys.mean(), ((xs - xs.mean()) ** 2).sum()
        through_zero = y / x
        slope = ((xs - x) * (ys - y)).sum() / spread if len(xs) > 1 else through_zero
        slope = min(max(slope, torch.zeros(())), through_zero)
        return float(y - slope * x), float(slope)
