"""Muon and the relatives that know no geometry but the source's own entries.

Muon²: KellerJordan/modded-nanogpt, records/track_3_optimization/results/20260501_muonsq/
train_gpt_simple_muonsq.py at c8554822ca4d99723fdbf59b790e6099ecafe8f3. MuonEq: MaeChd/muon-eq at
99b6c8b8f6d8b7d3424e85606d76302a71a8ea79. Scion: LIONS-EPFL/scion, scion.py at
a86f93e67d052068cc83f769ad0b833c867280fc.
"""

import math

import torch
from torch import Tensor

from tests.methods.references.plain import Reference, heavy_ball, lerp, muon_scale, polar


class Muon(Reference):
    def __init__(
        self,
        W: Tensor,
        lr: float = 0.02,
        *,
        momentum: float = 0.8,
        nesterov: bool = True,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(W, lr, weight_decay)
        self.beta, self.nesterov = momentum, nesterov

    def update(self, G: Tensor, x: Tensor, delta: Tensor) -> Tensor:
        self.M, X = lerp(G, self.M, self.beta, self.nesterov)
        return muon_scale(polar(X))


class MuonSquared(Reference):
    def __init__(
        self,
        W: Tensor,
        lr: float = 0.1,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0125,
        square_decay: float = 0.95,
    ) -> None:
        super().__init__(W, lr, weight_decay)
        self.beta, self.nesterov, self.beta_2 = momentum, nesterov, square_decay
        self.v = torch.zeros_like(W)

    def update(self, G: Tensor, x: Tensor, delta: Tensor) -> Tensor:
        self.M, X = lerp(G, self.M, self.beta, self.nesterov)
        self.v = self.beta_2 * self.v + (1 - self.beta_2) * G**2
        return muon_scale(polar(X / (self.v.sqrt() + 1e-10)))


class MuonPlus(Reference):
    def __init__(
        self,
        W: Tensor,
        lr: float = 1e-3,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        normalise: str = "none",
    ) -> None:
        super().__init__(W, lr, weight_decay)
        self.beta, self.nesterov, self.normalise = momentum, nesterov, normalise

    def update(self, G: Tensor, x: Tensor, delta: Tensor) -> Tensor:
        self.M, X = heavy_ball(G, self.M, self.beta, self.nesterov)
        O = polar(X)
        for axis in self.normalise.split("_") if self.normalise != "none" else []:
            over = {"col": 0, "row": 1}[axis]
            O = O / (O**2).sum(over, keepdim=True).add(1e-7).sqrt()
        return math.sqrt(self.m / self.n) * O


class MuonEq(Reference):
    def __init__(
        self,
        W: Tensor,
        lr: float = 1e-3,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        equilibrate: str = "row",
    ) -> None:
        super().__init__(W, lr, weight_decay)
        self.beta, self.nesterov, self.equilibrate = momentum, nesterov, equilibrate

    def update(self, G: Tensor, x: Tensor, delta: Tensor) -> Tensor:
        self.M, X = heavy_ball(G, self.M, self.beta, self.nesterov)
        r, c = (X**2).sum(1), (X**2).sum(0)
        Z = X
        if self.equilibrate != "col":
            Z = torch.diag((r + 1e-8) ** -0.5) @ Z
        if self.equilibrate != "row":
            Z = Z @ torch.diag((c + 1e-8) ** -0.5)
        return 0.2 * math.sqrt(max(self.m, self.n)) * polar(Z)


class Scion(Reference):
    def __init__(
        self,
        W: Tensor,
        lr: float = 1e-3,
        *,
        momentum: float = 0.0,
        constrained: bool = True,
        radius: float = 1.0,
        head_radius: float = 1.0,
    ) -> None:
        super().__init__(W, lr, weight_decay=1.0 if constrained else 0.0)
        self.beta, self.radius, self.head_radius = momentum, radius, head_radius
        self.is_head = False
        self.kernel = 1  # the number of elements of a convolution's kernel

    def update(self, G: Tensor, x: Tensor, delta: Tensor) -> Tensor:
        self.M, X = lerp(G, self.M, self.beta, nesterov=False)
        if self.is_head:
            return self.head_radius * X.sign() / self.n
        inputs = self.n // self.kernel
        return self.radius * math.sqrt(self.m / inputs) / self.kernel * polar(X)
