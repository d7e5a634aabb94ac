"""Directions nobody's gradient asks for: the default polar factor leaves them alone.

Beside a LayerNorm every gradient lacks a rank, and inputs that are always zero have no gradient at
all. The paper's full-SVD polar factor completes such a null space, and rounding decides how.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gomuon
from gomuon.functional import frobenius_graft
from gomuon.functional.oracle import matched_direction
from gomuon.optimizer import MatrixOptimizer

WIDTH, SYMBOLS = 12, 17
DEAD = 8
POLAR_METHODS = ("GoMuon", "Muon")


def layer_norm_model(symbols: int = SYMBOLS) -> nn.Module:
    torch.manual_seed(0)

    def block() -> nn.Module:
        return nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH)
        )

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = block()

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = x + self.block(x)
            return y

    return nn.Sequential(
        nn.Embedding(symbols, WIDTH),
        Residual(),
        Residual(),
        nn.LayerNorm(WIDTH),
        nn.Linear(WIDTH, symbols),
    ).double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randint(0, SYMBOLS, (48,), generator=generator)
    return x, (3 * x + step % 2) % SYMBOLS


def trained(make: Callable[[nn.Module], MatrixOptimizer], pieces: int, steps: int) -> nn.Module:
    """On whole batches, or on as many pieces of them."""
    model = layer_norm_model()
    optimizer = make(model)
    for step in range(steps):
        x, y = batch(step)
        optimizer.zero_grad()
        for xs, ys in zip(x.chunk(pieces), y.chunk(pieces), strict=True):
            (F.cross_entropy(model(xs), ys) / pieces).backward()
        optimizer.step()
    return model


def apart(one: nn.Module, other: nn.Module) -> float:
    """The largest relative difference of a parameter."""
    return max(
        float(((p - q).norm() / q.norm().clamp_min(1e-30)).detach())
        for p, q in zip(one.parameters(), other.parameters(), strict=True)
    )


@pytest.mark.parametrize("method", POLAR_METHODS)
def test_micro_batches_equal_their_union_beside_a_layer_norm(method: str) -> None:
    def make(polar: str) -> Callable[[nn.Module], MatrixOptimizer]:
        return lambda model: getattr(gomuon, method)(model, lr=0.02, polar=polar)

    for polar in ("exact", "fast"):
        assert apart(trained(make(polar), 1, 40), trained(make(polar), 3, 40)) < 1e-10
    # The completion is what rounding makes of it: this is why it is not the default.
    assert apart(trained(make("svd"), 1, 40), trained(make("svd"), 3, 40)) > 1e-4


def regression(polar: str | None) -> tuple[Tensor, float]:
    """First weights and test loss of a net for which eight inputs are zero while it trains."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1)
    )
    first = model[0].get_parameter("weight")
    start = first.detach().clone()
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
        if polar is None
        else gomuon.GoMuon(model, lr=0.02, polar=polar)  # type: ignore[arg-type]
    )
    generator = torch.Generator().manual_seed(1)

    def rows(count: int, dead: float) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 24, generator=generator)
        y = x[:, :4].sum(1, keepdim=True).tanh()
        x[:, -DEAD:] *= dead
        return x, y

    for _ in range(300):
        x, y = rows(64, 0.0)
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    x, y = rows(2000, 1.0)  # now the eight inputs show up
    with torch.no_grad():
        return first.detach() - start, float(F.mse_loss(model(x), y))


def test_inputs_that_are_always_zero_keep_their_weights() -> None:
    moved, loss = regression("auto")
    assert float(moved[:, -DEAD:].norm()) < 1e-4 * float(moved.norm())
    completed, completed_loss = regression("svd")
    assert float(completed[:, -DEAD:].norm()) > 0.1 * float(completed.norm())
    # What nobody asked for is in the prediction once such inputs show up.
    _, adamw_loss = regression(None)
    assert loss < 2 * adamw_loss
    assert completed_loss > 2 * loss


def test_a_dead_unit_keeps_its_weights() -> None:
    """No gradient reaches a unit behind a ReLU that never opens."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2)
    )
    first, second = (model[i].get_parameter("weight") for i in (0, 2))
    with torch.no_grad():
        model[0].get_parameter("bias")[3] = -100.0
    start = first.detach().clone(), second.detach().clone()
    optimizer = gomuon.GoMuon(model, lr=0.02, adamw={"lr": 0.0})
    for step in range(9):
        x = torch.randn(32, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    moved, then_moved = first.detach() - start[0], second.detach() - start[1]
    assert float(moved[3].norm()) < 1e-5
    assert float(then_moved[:, 3].norm()) < 1e-4
    assert float(moved.norm()) > 0.1


def test_the_grafts_length_is_the_polar_factors_own() -> None:
    """√rank, as in Muon's own update: √min(m, n) would stretch the directions that are left."""
    M = torch.diag(torch.tensor([3.0, 2.0, 0.0, 0.0]))
    D, rank = matched_direction(M, None, None, polar_method="canonical")
    assert float(rank) == 2
    torch.testing.assert_close(frobenius_graft(5 * D, rank), D)
    assert float(frobenius_graft(D).norm()) == pytest.approx(2.0)  # the paper's, at full rank
    assert float(matched_direction(torch.zeros(3, 4), None, None)[1]) == 0


def test_one_row_moves_no_weight_further_than_muon_does() -> None:
    """A batch of one row has a gradient of rank one."""
    lengths = {}
    for method in (gomuon.GoMuon, gomuon.Muon):
        torch.manual_seed(0)
        layer = nn.Linear(64, 64, bias=False)
        before = layer.weight.detach().clone()
        optimizer = method(layer, lr=0.1, polar="exact")
        layer(torch.randn(1, 64)).square().mean().backward()
        optimizer.step()
        change = (layer.weight.detach() - before).double()
        lengths[method] = float(torch.linalg.matrix_norm(change, ord=2))
    assert lengths[gomuon.GoMuon] == pytest.approx(lengths[gomuon.Muon], rel=1e-4)
    assert lengths[gomuon.Muon] == pytest.approx(0.1, rel=1e-4)
