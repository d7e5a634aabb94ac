"""Published identities: where two methods coincide, they do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from curvlinops import EFLinearOperator
from torch import Tensor, nn

import gomuon
from gomuon.lab.bench.plain_loop import polar
from gomuon.optimizer import MatrixOptimizer
from tests.methods.references.data import ROWS, SHAPES, layer, learn, relative_error, rows

EVERY_SHAPE = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())


def make(method: str, module: nn.Module, **settings: Any) -> MatrixOptimizer:
    made = getattr(gomuon, method)(module, loss_reduction="sum", **settings)
    assert isinstance(made, MatrixOptimizer)
    return made


def assert_same_path(
    shape: tuple[int, int],
    one: Callable[[nn.Module], torch.optim.Optimizer],
    other: Callable[[nn.Module], torch.optim.Optimizer],
    tolerance: float = 1e-10,
) -> None:
    m, n = shape
    modules = layer(m, n), layer(m, n)
    optimizers = one(modules[0]), other(modules[1])
    for step in range(12):
        x, g = rows(2 * step, ROWS, n), rows(2 * step + 1, ROWS, m)
        for optimizer, module in zip(optimizers, modules, strict=True):
            learn(optimizer, module, x, g)
        assert relative_error(modules[0].weight, modules[1].weight.detach()) < tolerance, step
    assert relative_error(modules[0].weight, layer(m, n).weight.detach()) > 1e-3, "nothing moved"


@EVERY_SHAPE
@pytest.mark.parametrize("nesterov", [True, False])
def test_mousse_without_its_power_is_muon(shape: tuple[int, int], nesterov: bool) -> None:
    same: dict[str, Any] = {"lr": 0.02, "momentum": 0.9, "nesterov": nesterov, "weight_decay": 0.0}
    assert_same_path(
        shape,
        lambda module: make("Mousse", module, alpha=0.0, aspect="max", refresh_every=2, **same),
        lambda module: make("Muon", module, **same),
    )


@EVERY_SHAPE
@pytest.mark.parametrize("nesterov", [True, False])
def test_fismo_with_identity_factors_is_muon(shape: tuple[int, int], nesterov: bool) -> None:
    same: dict[str, Any] = {"lr": 0.02, "momentum": 0.9, "nesterov": nesterov, "weight_decay": 0.1}
    assert_same_path(
        shape,
        lambda module: make("FISMO", module, factor_decay=1.0, **same),
        lambda module: make("Muon", module, **same),
    )


class LateAdam(torch.optim.Adam):
    """Adam that lets its first step pass, as SOAP does to make its bases."""

    waited = False

    def step(self, closure: Any = None) -> Any:
        if not self.waited:
            self.waited = True
            return None
        return super().step(closure)


@EVERY_SHAPE
def test_soap_in_the_identity_basis_is_adam(shape: tuple[int, int]) -> None:
    # Adam adds ε after the bias correction and SOAP before it, so it is nothing here.
    same: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 0.0, "weight_decay": 0.0}
    assert_same_path(
        shape,
        lambda module: make("SOAP", module, max_side=0, refresh_every=2, **same),
        lambda module: LateAdam(module.parameters(), **same),
    )


def first_move(module: nn.Linear, optimizer: MatrixOptimizer, x: Tensor, g: Tensor) -> Tensor:
    """What one update subtracts from the weight."""
    before = module.weight.detach().clone()
    learn(optimizer, module, x, g)
    return before - module.weight.detach()


def bare_shampoo(module: nn.Module) -> MatrixOptimizer:
    """One gradient, no average, no graft, no momentum, exponent ¼."""
    return make(
        "Shampoo",
        module,
        lr=1.0,
        factor_decay=1.0,
        ridge=1e-14,
        power=0.25,
        graft=None,
        momentum=0.0,
    )


@EVERY_SHAPE
def test_shampoo_on_one_gradient_is_its_polar(shape: tuple[int, int]) -> None:
    """(GGᵀ)^(−¼) G (GᵀG)^(−¼) = UVᵀ."""
    m, n = shape
    x, g = rows(0, ROWS, n), rows(1, ROWS, m)
    module = layer(m, n)
    move = first_move(module, bare_shampoo(module), x, g)
    torch.testing.assert_close(move, polar(g.T @ x), rtol=0, atol=1e-8)


def test_shampoo_on_one_example_is_the_polar_of_an_outer_product() -> None:
    x, g = rows(0, 1, 6), rows(1, 1, 4)
    module = layer(4, 6)
    move = first_move(module, bare_shampoo(module), x, g)
    torch.testing.assert_close(move, g.T @ x / (g.norm() * x.norm()), rtol=0, atol=1e-8)


@pytest.mark.parametrize("bias", [False, True])
def test_kfac_on_one_datum_is_the_natural_gradient(bias: bool) -> None:
    """F = A ⊗ B exactly; curvlinops' dense F + damping·I is the oracle."""
    x, label, damping = rows(0, 1, 5), torch.tensor([2]), 0.01
    loss_function = nn.CrossEntropyLoss(reduction="sum")
    module = layer(4, 5, bias=bias)
    fisher = EFLinearOperator(module, loss_function, list(module.parameters()), [(x, label)])
    F = fisher @ torch.eye(fisher.shape[0]).double()

    before = nn.utils.parameters_to_vector(module.parameters()).detach()
    optimizer = make(
        "KFAC", module, lr=1.0, momentum=0.0, factor_decay=0.0, damping=damping, kl_clip=None
    )
    loss_function(module(x), label).backward()
    gradient = torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])
    optimizer.step()
    move = before - nn.utils.parameters_to_vector(module.parameters()).detach()
    natural = torch.linalg.solve(F + damping * torch.eye(len(F)).double(), gradient)
    torch.testing.assert_close(move, natural, rtol=1e-9, atol=1e-11)
