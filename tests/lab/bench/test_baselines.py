"""The baselines compute what they are compared with."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gomuon
from gomuon.lab.bench.newton_schulz import NewtonSchulzMuon, newton_schulz
from gomuon.lab.bench.plain_loop import PlainOptimizer, plain_go_muon, plain_muon
from tests.models import language_loss, transformer

ADAMW = {"lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.0}


def trained(
    model: nn.Module, optimizer: PlainOptimizer | torch.optim.Optimizer, steps: int
) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        language_loss(model, step).backward()
        optimizer.step()


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for (name, p), q in zip(one.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-8, atol=1e-8, msg=name)


@pytest.mark.parametrize("K", [1, 4])
def test_the_plain_script_takes_go_muons_steps(K: int) -> None:
    one, other = transformer(), transformer()
    trained(one, gomuon.GoMuon(one, lr=0.08, refresh_every=K, adamw=ADAMW), 9)
    trained(other, plain_go_muon(other, 0.08, refresh_every=K, adamw=ADAMW), 9)
    assert_same(one, other)


def test_the_plain_script_takes_muons_steps() -> None:
    one, other = transformer(), transformer()
    trained(one, gomuon.Muon(one, lr=0.02, adamw=ADAMW), 6)
    trained(other, plain_muon(other, 0.02, adamw=ADAMW), 6)
    assert_same(one, other)


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 24, 8), (2, 8, 24)])
def test_newton_schulz_keeps_singular_vectors_and_lifts_values_towards_one(
    shape: tuple[int, int, int],
) -> None:
    torch.manual_seed(0)
    X = torch.randn(shape)
    U, S, Vh = torch.linalg.svd(X, full_matrices=False)
    core = U.mT @ newton_schulz(X) @ Vh.mT
    diagonal = core.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(core, torch.diag_embed(diagonal), atol=1e-4, rtol=0)
    well = S / S.amax(-1, keepdim=True) > 0.05
    assert ((diagonal > 0.5) & (diagonal < 1.5))[well].all()


def test_newton_schulz_follows_muon_with_stacks_of_equal_shapes() -> None:
    """One step by hand for each parameter alone, convolutions flattened."""
    torch.manual_seed(0)
    shapes = [(8, 8), (8, 8), (24, 8), (4, 2, 3, 3)]
    parameters = [torch.randn(shape).requires_grad_() for shape in shapes]
    optimizer = NewtonSchulzMuon(parameters, lr=0.1, momentum=0.8)
    momenta = [torch.zeros(p.shape) for p in parameters]
    for _ in range(3):
        expected = []
        for parameter, M in zip(parameters, momenta, strict=True):
            G = parameter.grad = torch.randn(parameter.shape)
            M.mul_(0.8).add_(0.2 * G)
            X = (0.2 * G + 0.8 * M).flatten(1)
            m, n = X.shape
            D = newton_schulz(X[None])[0] * max(1, m / n) ** 0.5
            expected.append(parameter.detach() - 0.1 * D.view(parameter.shape))
        optimizer.step()
        for parameter, value in zip(parameters, expected, strict=True):
            torch.testing.assert_close(parameter.detach(), value)
    assert len(optimizer.state) == 3, "one memory for each shape"
