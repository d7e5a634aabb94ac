"""K-FAC and all that is SOAP's kind need eigenvectors. By products they are estimates: how near?"""

import copy
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from gomuon import KFAC, SOAP, GeometryWarning
from gomuon.functional import linalg
from gomuon.functional.orthonormal import FIRST_STEPS, LATER_STEPS
from gomuon.methods import kfac
from gomuon.methods.kfac import decomposed, iterated
from gomuon.optimizer import MatrixOptimizer
from gomuon.recipes.registry import METHODS
from tests.functional.matrices import distance, normal, orthogonal, random_source
from tests.methods.table import saved
from tests.models import mlp, train, transformer

# KL-Shampoo is not among them: its eigenvalues start equal, and its first bases hardly matter.
ADAM_IN_BASES = ["SOAP", "SOAPMuon", "KLSOAP"]
ESTIMATED = ["KFAC", *ADAM_IN_BASES]


# ---- K-FAC's preconditioned gradient -------------------------------------------------------------


def natural(eigen_B: Tensor, eigen_A: Tensor, X: Tensor, damping: float = 1e-3) -> Tensor:
    """K-FAC's direction with packed eigenvalues and eigenvectors, in float64."""
    (b, V_B), (a, V_A) = ((e[0].double().clamp_min(0), e[1:].double()) for e in (eigen_B, eigen_A))
    return V_B @ ((V_B.mT @ X @ V_A) / (b[:, None] * a + damping)) @ V_A.mT


class Drifting:
    """A side's moments: eigenvalues 20/i^decay in a basis that turns a little at every step."""

    def __init__(self, d: int, decay: float, source: torch.Generator) -> None:
        self.source, self.basis = source, orthogonal(d, source)
        self.deviations = (20 * torch.arange(1, d + 1, dtype=torch.float64) ** -decay).sqrt()
        self.factor = torch.eye(d, dtype=torch.float64)  # K-FAC's averages start here

    def rows(self) -> Tensor:
        """A batch of 256 rows, and the average with their moment."""
        d = len(self.factor)
        turn = normal(d, d, self.source) * 0.02 / d**0.5
        self.basis = torch.linalg.qr(self.basis + self.basis @ (turn - turn.mT))[0]
        rows = normal(256, d, self.source) * self.deviations @ self.basis.mT
        self.factor = 0.95 * self.factor + 0.05 * rows.mT @ rows / 256
        return rows


def measured(decay: float, every: int, steps: int = 40) -> list[tuple[float, float]]:
    """Relative distances and cosines between directions by products and exact ones."""
    source = random_source(0)
    left, right = Drifting(40, decay, source), Drifting(64, decay, source)
    bases: list[Tensor | None] = [None, None]
    found = []
    for step in range(steps):
        X = left.rows().mT @ right.rows() / 256
        if step % every:
            continue
        eigen = []
        for index, side in enumerate((left, right)):
            S = side.factor.float().unsqueeze(0)
            result, fine = iterated(S, bases[index])
            assert bool(fine.all())
            bases[index] = result[:, 1:]
            eigen.append(result[0])
        exact = natural(decomposed(left.factor), decomposed(right.factor), X)
        D = natural(eigen[0], eigen[1], X)
        found.append((distance(D, exact), float((D * exact).sum() / (D.norm() * exact.norm()))))
    return found


@pytest.mark.parametrize("decay", [0.5, 1.0, 2.0])
def test_kfacs_direction_is_near_from_the_first_refresh_on(decay: float) -> None:
    every_step = measured(decay, every=1)
    assert every_step[0][0] < 0.06
    assert every_step[0][1] > 0.998
    assert max(far for far, _ in every_step) < 0.15
    assert min(cosine for _, cosine in every_step) > 0.992
    # Eigenvalues of the first factors are nearly equal. Later they are apart, and separated sooner.
    assert max(far for far, _ in every_step[-5:]) < 0.05
    assert min(cosine for _, cosine in every_step[-5:]) > 0.999


@pytest.mark.parametrize("decay", [0.5, 1.0, 2.0])
def test_and_with_ten_steps_between_refreshes(decay: float) -> None:
    seldom = measured(decay, every=10)
    assert max(far for far, _ in seldom) < 0.3
    assert min(cosine for _, cosine in seldom) > 0.975


def test_equal_eigenvalues_may_mix_and_change_nothing() -> None:
    values = torch.tensor([4.0, 4.0, 4.0, 1.0, 1.0, 0.01], dtype=torch.float64)
    V, source = orthogonal(6, random_source(0)), random_source(1)
    S, X = (V * values) @ V.mT, normal(6, 6, source)
    mixed = iterated(S.unsqueeze(0))[0][0]
    assert distance(natural(mixed, mixed, X), natural(decomposed(S), decomposed(S), X)) < 1e-9


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


def trained(name: str, steps: int, **settings: Any) -> tuple[Tensor, Tensor, float]:
    """All weights before and after, and the mean loss of the last steps."""
    model = transformer(layers=1, dtype=torch.float32)
    before = weights(model)
    losses = train(model, METHODS[name](model, **settings), range(steps))
    return before, weights(model), sum(losses[-10:]) / 10


def test_kfacs_first_steps_are_near_those_by_decomposition() -> None:
    before, exact, _ = trained("KFAC", 3, roots="eigh")
    _, found, _ = trained("KFAC", 3, roots="products")
    assert 0 < float((found - exact).norm()) < 0.02 * float((exact - before).norm())


@pytest.mark.parametrize("name", ESTIMATED)
def test_the_loss_is_that_by_decomposition(name: str) -> None:
    losses = [trained(name, 60, roots=roots)[2] for roots in ("eigh", "products")]
    assert losses[1] == pytest.approx(losses[0], rel=2e-4)


# ---- how it is done ------------------------------------------------------------------------------


def test_the_first_basis_takes_many_steps_and_later_ones_start_from_the_last() -> None:
    calls: list[tuple[int, Tensor | None]] = []
    real = kfac.eigenbasis

    def noted(S: Tensor, steps: int, start: Tensor | None = None) -> tuple[Tensor, Tensor]:
        calls.append((steps, None if start is None else start.clone()))
        return real(S, steps, start)

    model = mlp(4, 5, 5, 3, dtype=torch.float32)
    optimizer = KFAC(model, roots="products")
    with mock.patch.object(kfac, "eigenbasis", noted):
        step(model, optimizer)
        assert {steps for steps, _ in calls} == {FIRST_STEPS}
        assert all(start is None for _, start in calls)
        bases = [
            state[f"{side}_basis"].clone()
            for side in ("left", "right")
            for state in optimizer.state.values()
            if f"{side}_basis" in state
        ]
        calls.clear()
        step(model, optimizer)
    assert {steps for steps, _ in calls} == {LATER_STEPS}
    starts = [basis for _, start in calls if start is not None for basis in start]
    assert len(starts) == len(bases)
    for start in starts:
        alike = [basis[0] for basis in bases if basis[0].shape == start.shape]
        assert any(torch.equal(start, basis) for basis in alike)


def step(model: nn.Module, optimizer: MatrixOptimizer, rows: int = 12) -> None:
    first = next(model.parameters())
    x = torch.randn(rows, first.shape[1], generator=random_source(rows), dtype=torch.float64)
    optimizer.zero_grad()
    model(x.to(first.dtype)).square().sum().backward()
    optimizer.step()


def test_without_rows_kfacs_factors_stay_and_the_basis_comes_nearer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linalg, "decomposes_well", lambda device: False)
    model = mlp(4, 5, 5, 3)
    optimizer = KFAC(model)
    step(model, optimizer)
    state = next(state for state in optimizer.state.values() if "left_basis" in state)
    kept = copy.deepcopy(state)
    with warnings.catch_warnings():
        warnings.simplefilter("error", GeometryWarning)
        step(model, optimizer, rows=0)
    assert torch.equal(state["left_factor"], kept["left_factor"])
    assert "failures" not in state

    def off_diagonal(basis: Tensor) -> float:
        S = basis.mT @ state["left_factor"] @ basis
        return float((S - torch.diag_embed(S.diagonal(dim1=-2, dim2=-1))).norm())

    assert off_diagonal(state["left_basis"]) < off_diagonal(kept["left_basis"])


@pytest.mark.parametrize("name", ESTIMATED)
def test_both_forms_keep_the_same_state_and_continue_each_other(name: str) -> None:
    runs = {roots: mlp(6, 6, 6, 6) for roots in ("eigh", "products")}
    optimizers = {roots: METHODS[name](model, roots=roots) for roots, model in runs.items()}
    for roots, model in runs.items():
        step(model, optimizers[roots], 40)
    shapes = [
        {(p, key): getattr(value, "shape", value) for p, entries in
         optimizer.state_dict()["state"].items() for key, value in entries.items()}
        for optimizer in optimizers.values()
    ]  # fmt: skip
    assert shapes[0] == shapes[1]
    for here, there in (("eigh", "products"), ("products", "eigh")):
        model = copy.deepcopy(runs[here])
        again = METHODS[name](model, roots=there)
        checkpoint = saved(optimizers[here].state_dict())
        for group in checkpoint["param_groups"]:
            group["roots"] = there
        again.load_state_dict(checkpoint)
        step(model, again, 40)
        assert all(p.isfinite().all() for p in model.parameters())


# ---- SOAP's bases --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ADAM_IN_BASES)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-3), (torch.float64, 1e-10)])
def test_soaps_power_steps_are_those_with_qr(name: str, dtype: torch.dtype, bound: float) -> None:
    """From the same first bases. Columns of other signs change no step."""
    models = [mlp(6, 6, 6, 6, dtype=dtype) for _ in range(2)]
    first = METHODS[name](models[0], roots="eigh", refresh_every=2)
    step(models[0], first, 40)
    checkpoint = saved(first.state_dict())
    for group in checkpoint["param_groups"]:
        group["roots"] = "products"
    second = METHODS[name](models[1], roots="products", refresh_every=2)
    second.load_state_dict(checkpoint)
    models[1].load_state_dict(models[0].state_dict())
    before = weights(models[0])
    for rows in range(40, 49):
        for model, optimizer in zip(models, (first, second), strict=True):
            step(model, optimizer, rows)
    exact, found = (weights(model) for model in models)
    assert float((found - exact).norm()) < bound * float((exact - before).norm())
    bases = [
        [state["left_basis"] for state in optimizer.state.values() if "left_basis" in state]
        for optimizer in (first, second)
    ]
    assert any(not torch.allclose(*pair) for pair in zip(*bases, strict=True))  # other signs
    for ours, theirs in zip(*bases, strict=True):
        torch.testing.assert_close((ours * theirs).sum(-2).abs(), torch.ones_like(ours[:, 0]))


def test_soaps_first_basis_is_nearly_that_of_the_gram() -> None:
    model = mlp(30, 40, 40, 30, dtype=torch.float32)
    optimizer = SOAP(model, roots="products")
    step(model, optimizer, 200)
    states = [state for state in optimizer.state.values() if "left_basis" in state]
    assert states
    for state in states:
        for side in ("left", "right"):
            L, Q = state[f"{side}_factor"].double(), state[f"{side}_basis"].double()
            rotated = Q.mT @ L @ Q
            values = rotated.diagonal(dim1=-2, dim2=-1)
            assert float((rotated - torch.diag_embed(values)).norm()) < 1e-3 * float(L.norm())
            assert bool((values.diff() <= 1e-6 * values[..., :1]).all())  # largest first
            exact = torch.linalg.eigvalsh(L).flip(-1)
            assert float((values - exact).norm()) < 1e-4 * float(exact.norm())
