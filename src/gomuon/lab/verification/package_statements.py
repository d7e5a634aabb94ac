"""What this package promises beside the paper: its update and its polar factor in float32."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from gomuon import GoMuon
from gomuon.functional import polar
from gomuon.lab.bench.plain_loop import plain_go_muon
from gomuon.lab.verification.adversary import Case, Effort, Found
from gomuon.lab.verification.statement import Statement, always, at_most, frobenius
from gomuon.lab.verification.unknowns import SourceMatrix

UPDATES = 12
WEIGHTS = 1e-8  # how far the optimizer's weights may be from the plain loop's
FLOAT32 = 1e-5  # how far polar="exact" may be from the exact polar factor in float32
# The larger ones are of the size of layers. κ₂ is at most 1e4, as documented.
MATRICES = (SourceMatrix(4, 3), SourceMatrix(3, 5), SourceMatrix(4, 4), SourceMatrix(24, 16))


def float32_polar(X: Tensor) -> Tensor:
    """polar="exact" in float32 against a float64 SVD of the same numbers."""
    X = X.float()
    U, _, Vh = torch.linalg.svd(X.double(), full_matrices=False)
    exact = U @ Vh
    error = frobenius(polar(X, "exact").double() - exact) / frobenius(exact)
    return at_most(error, torch.full_like(error, FLOAT32))


def plain_loop(effort: Effort, generator: torch.Generator) -> Found:
    """The weights after some updates, against those of a plain loop over layers."""
    slacks = [1 - _apart(effort.device, generator) / WEIGHTS for _ in range(effort.seeds)]
    return Found(len(slacks), float(torch.tensor(slacks, dtype=torch.float64).amin()))


def _apart(device: torch.device, generator: torch.Generator) -> float:
    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    plain = nn.Sequential(nn.Linear(12, 20, bias=False), nn.Tanh(), nn.Linear(20, 8, bias=False))
    plain.double()
    with torch.no_grad():
        for weight in plain.parameters():
            weight.copy_(normal(*weight.shape) / weight.shape[1] ** 0.5)
    ours = copy.deepcopy(plain).to(device)
    optimizer = GoMuon(ours, lr=0.05, routes={"*": "matrix"}, polar="svd")
    script = plain_go_muon(plain, lr=0.05)
    for _ in range(UPDATES):
        x, y = normal(32, 12), normal(32, 8)
        for network, stepper in ((ours, optimizer), (plain, script)):
            at = next(network.parameters()).device
            # A mean over rows alone, as a cross-entropy's.
            error = (network(x.to(at)) - y.to(at)).square().sum(-1).mean()
            stepper.zero_grad()
            error.backward()
            stepper.step()
    pairs = zip(ours.parameters(), plain.parameters(), strict=True)
    apart = [(a.detach().cpu() - b.detach()).norm() / b.detach().norm() for a, b in pairs]
    return float(torch.stack(apart).amax())


PACKAGE = (
    Statement(
        "complete update",
        "Eq. (27–35)",
        f"{UPDATES} updates of GoMuon and of a plain loop give weights within {WEIGHTS:g}",
        plain_loop,
    ),
    Statement(
        "exact polar in float32",
        "gomuon",
        f'polar="exact" is within {FLOAT32:g} of the polar factor up to κ₂ = 1e4',
        always(*(Case((matrix,), float32_polar) for matrix in MATRICES)),
        allowed=0.0,
    ),
)
