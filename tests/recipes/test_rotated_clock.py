"""The clock `Rotated`: a basis is renewed when its factor has turned away from it."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import gomuon
from gomuon import Adaptive, Rotated
from gomuon.functional import linalg
from gomuon.functional.rotation import off_diagonal_share
from gomuon.intervals import longest, number_of_turns, shortest
from gomuon.optimizer import MatrixOptimizer
from gomuon.recipes.registry import METHODS
from gomuon.settings import ROTATED
from tests.geometry.test_one_wait import ReadBacks
from tests.methods import references
from tests.methods.references.data import ROWS, layer, learn, relative_error, rows
from tests.models import train, transformer

TAKING = [
    name
    for name, kind in METHODS.items()
    if "refresh_every" in kind.recipe.settings
    and kind.recipe.settings["refresh_every"].kind is ROTATED
]
DEFAULT = {"routes": {"*": "matrix"}}


def test_the_methods_are_found() -> None:
    assert TAKING == ["Shampoo", "SOAP", "Mousse", "SOAPMuon", "KLShampoo", "KLSOAP"]


def bases(module: nn.Linear, optimizer: MatrixOptimizer) -> list[Tensor]:
    state = optimizer.state[module.weight]
    return [state[f"{side}_basis"].clone() for side in ("left", "right")]


def renewals(
    method: str, gradients: Callable[[int], Tensor], steps: int, every: Rotated, **settings: Any
) -> list[int]:
    """The steps after which a basis is another one than before; the first is always one."""
    module = layer(6, 6)
    optimizer = METHODS[method](module, refresh_every=every, lr=1e-3, **settings)
    found, before = [], None
    for step in range(steps):
        optimizer.zero_grad()
        module.weight.grad = gradients(step)
        optimizer.step()
        now = bases(module, optimizer)
        if before is None or not all(map(torch.equal, now, before)):
            found.append(step)
        before = now
    return found


def constant(step: int) -> Tensor:
    return rows(0, 6, 6)


def random(step: int) -> Tensor:
    """No gradient has the singular vectors of another."""
    return rows(step, 6, 6)


QUICK = {"factor_decay": 0.5}


@pytest.mark.parametrize("method", TAKING)
def test_bases_of_constant_factors_are_never_renewed(method: str) -> None:
    # The factors of KL-Shampoo move at first, until each is whitened by the other.
    assert renewals(method, constant, 12, Rotated(0.3), **QUICK) == [0]


@pytest.mark.parametrize("method", TAKING)
def test_bases_of_turning_factors_are_renewed_at_every_look(method: str) -> None:
    found = renewals(method, random, 12, Rotated(1e-6), **QUICK)
    assert found[-8:] == list(range(4, 12))


@pytest.mark.parametrize("method", TAKING)
def test_there_are_looks_at_every_nth_step_only(method: str) -> None:
    found = renewals(method, random, 16, Rotated(1e-6, every=5), **QUICK)
    assert found == [0, 5, 10, 15]


def test_a_larger_threshold_renews_less() -> None:
    counts = [len(renewals("SOAP", random, 30, Rotated(t))) for t in (0.05, 0.2, 0.6)]
    assert counts == sorted(counts, reverse=True)
    assert len(set(counts)) == 3, counts


def test_each_side_of_each_matrix_is_decided_alone() -> None:
    """Rows of the gradient are mixed anew in each step, so its columns' Gram is constant."""
    module = layer(6, 6)
    optimizer = gomuon.SOAP(module, refresh_every=Rotated(0.01), lr=1e-3)
    G = rows(0, 6, 6)
    seen = []
    for step in range(5):
        module.weight.grad = torch.linalg.qr(rows(step + 1, 6, 6))[0] @ G
        optimizer.step()
        seen.append(bases(module, optimizer))
    assert all(torch.equal(now[1], seen[0][1]) for now in seen)
    assert not torch.equal(seen[-1][0], seen[0][0])


# ---- against plain loops -------------------------------------------------------------------------


def share(Q: Tensor, S: Tensor) -> float:
    B = Q.T @ S @ Q
    return float((B - torch.diag(B.diagonal())).norm() / B.norm())


class LookingSOAP(references.SOAP):
    """Turns either basis after a step in which its share is above the threshold."""

    threshold = 0.05
    turns = 0

    def rotate(self) -> None:
        sides = [name for name in ("L", "R") if self.no_longer_fits(name)]
        self.turns += len(sides)
        if "L" in sides:
            order = (self.Q_L.T @ self.L @ self.Q_L).diagonal().argsort(descending=True)
            self.v = self.v[order]
            self.Q_L = torch.linalg.qr(self.L @ self.Q_L[:, order])[0]
        if "R" in sides:
            order = (self.Q_R.T @ self.R @ self.Q_R).diagonal().argsort(descending=True)
            self.v = self.v[:, order]
            self.Q_R = torch.linalg.qr(self.R @ self.Q_R[:, order])[0]

    def no_longer_fits(self, name: str) -> bool:
        return share(getattr(self, f"Q_{name}"), getattr(self, name)) > self.threshold


def test_soap_follows_a_loop_with_the_criterion() -> None:
    module = layer(5, 5)
    optimizer = gomuon.SOAP(module, refresh_every=Rotated(0.05), loss_reduction="sum")
    reference = LookingSOAP(module.weight.detach(), refresh_every=1)
    for step in range(40):
        x, g = rows(2 * step, ROWS, 5), rows(2 * step + 1, ROWS, 5)
        learn(optimizer, module, x, g)
        reference.step(g.T @ x, x, g)
        assert relative_error(module.weight, reference.W) < 1e-8, step
    assert 0 < reference.turns < 2 * 39, "else the criterion was not tested"


class LookingShampoo(references.Shampoo):
    """Roots of QᵀSQ's diagonal in a kept basis, which is renewed above the threshold."""

    threshold = 0.2
    renewals = 0

    def root(self, S: Tensor) -> Tensor:
        name = "Q_L" if S is self.L else "Q_R"
        Q = getattr(self, name, None)
        if Q is None or share(Q, S) > self.threshold:
            Q = torch.linalg.eigh(S)[1]
            setattr(self, name, Q)
            self.renewals += 1
        values = (Q.T @ S @ Q).diagonal().clamp(min=0)
        return Q @ torch.diag((values + self.ridge * values.max()) ** -self.power) @ Q.T


@pytest.mark.parametrize("every", [1, 3])
def test_shampoo_follows_a_loop_with_the_criterion(every: int) -> None:
    module = layer(5, 5)
    settings: dict[str, Any] = {"ridge": 1e-3, "factor_decay": 0.9}
    optimizer = gomuon.Shampoo(
        module, refresh_every=Rotated(0.2, every), loss_reduction="sum", **settings
    )
    reference = LookingShampoo(module.weight.detach(), refresh_every=every, **settings)
    for step in range(40):
        x, g = rows(2 * step, ROWS, 5), rows(2 * step + 1, ROWS, 5)
        learn(optimizer, module, x, g)
        reference.step(g.T @ x, x, g)
        assert relative_error(module.weight, reference.W) < 1e-8, step
    assert 2 < reference.renewals < 2 * 40 // every, "else the criterion was not tested"


@pytest.mark.parametrize("method", TAKING)
def test_if_every_look_renews_it_is_a_refresh_in_every_step(method: str) -> None:
    models = [layer(6, 6) for _ in range(2)]
    optimizers = [
        METHODS[method](model, refresh_every=every, lr=1e-3)
        for model, every in zip(models, (1, Rotated(1e-12)), strict=True)
    ]
    for step in range(8):
        for model, optimizer in zip(models, optimizers, strict=True):
            learn(optimizer, model, rows(2 * step, ROWS, 6), rows(2 * step + 1, ROWS, 6))
    torch.testing.assert_close(models[0].weight, models[1].weight, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_the_share_is_the_relative_error_of_the_cached_basis(scale: float) -> None:
    V = torch.linalg.qr(rows(0, 3, 6, 6))[0]
    S = scale * (V * torch.logspace(0, -3, 6).double()) @ V.mT
    Q = torch.linalg.qr(rows(1, 3, 6, 6))[0]
    kept = Q @ torch.diag_embed((Q.mT @ S @ Q).diagonal(dim1=-2, dim2=-1)) @ Q.mT
    error = torch.linalg.matrix_norm(S - kept) / torch.linalg.matrix_norm(S)
    torch.testing.assert_close(off_diagonal_share(S, Q), error)
    assert float(off_diagonal_share(S, V).max()) < 1e-14
    assert float(off_diagonal_share(S.float(), V.float()).max()) < 1e-6
    assert float(off_diagonal_share(0 * S, Q).max()) == 0


# ---- checkpoints and settings --------------------------------------------------------------------


def equal(one: nn.Module, other: nn.Module) -> bool:
    both = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(p, q) for p, q in both)


@pytest.mark.parametrize("method", TAKING)
def test_a_run_continues_to_the_bit_from_a_file_of_plain_numbers(method: str) -> None:
    def make(model: nn.Module) -> MatrixOptimizer:
        return METHODS[method](model, refresh_every=Rotated(0.1, every=2), lr=1e-3)

    straight = transformer(layers=1)
    optimizer = make(straight)
    train(straight, optimizer, range(7))
    kept = copy.deepcopy(straight.state_dict())
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    train(straight, optimizer, range(7, 12))

    resumed = transformer(seed=1, layers=1)
    resumed.load_state_dict(kept)
    second = make(resumed)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    assert second.param_groups[0]["refresh_every"] == Rotated(0.1, every=2)
    train(resumed, second, range(7, 12))
    assert equal(straight, resumed)


def test_a_clock_may_be_exchanged_in_the_middle_of_a_run() -> None:
    model = transformer(layers=1)
    optimizer = gomuon.Shampoo(model, refresh_every=2)
    train(model, optimizer, range(3))
    optimizer.param_groups[0]["refresh_every"] = Rotated(0.1)
    train(model, optimizer, range(3, 6))
    assert any("left_basis" in state for state in optimizer.state.values())
    optimizer.param_groups[0]["refresh_every"] = 3
    train(model, optimizer, range(6, 9))
    assert all(p.isfinite().all() for p in model.parameters())


def test_what_the_planner_and_the_bench_count_with() -> None:
    every = Rotated(0.1, every=4)
    assert (shortest(every), longest(every), number_of_turns(every, 7)) == (4, 4, 4)
    assert "refresh_every: Rotated(threshold=0.1, every=4)" in repr(
        gomuon.SOAP(transformer(layers=1), refresh_every=every)
    )


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"threshold": 0}, r"threshold of Rotated must be a number in \(0, 1\), got 0"),
        ({"threshold": 1}, r"threshold of Rotated must be a number in \(0, 1\), got 1"),
        ({"threshold": "low"}, "threshold of Rotated .* got 'low'"),
        ({"threshold": float("nan")}, "threshold of Rotated .* got nan"),
        ({"every": 0}, "every of Rotated must be a whole number >= 1, got 0"),
        ({"every": 2.5}, "every of Rotated must be a whole number >= 1, got 2.5"),
    ],
)
def test_values_out_of_range_are_named(given: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Rotated(**given)


def test_methods_say_which_clock_they_take() -> None:
    with pytest.raises(ValueError, match=r"or gomuon.Rotated\(…\), got Adaptive"):
        gomuon.SOAP(transformer(layers=1), refresh_every=Adaptive())
    with pytest.raises(ValueError, match=r"or gomuon.Adaptive\(…\), got Rotated"):
        gomuon.GoMuon(transformer(layers=1), refresh_every=Rotated())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="whole number >= 1, got Rotated"):
        gomuon.KFAC(transformer(layers=1), refresh_every=Rotated())


# ---- accelerators --------------------------------------------------------------------------------


@pytest.mark.parametrize("method", TAKING)
def test_an_accelerator_waits_once_in_a_look_and_decides_the_same(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a decomposition")

    every = Rotated(0.2, every=2)
    counts: list[int] = []
    models = [transformer(layers=1) for _ in range(2)]
    optimizers = [
        METHODS[method](m, refresh_every=every, roots="products", lr=1e-3) for m in models
    ]
    train(models[0], optimizers[0], range(6))
    monkeypatch.setattr(linalg, "decomposes_well", lambda device: False)
    geometry = type(optimizers[1].recipe.geometry)

    def counting(real: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            with AnyReadBack() as seen:
                result = real(*args)
            counts[-1] += seen.count
            return result

        return counted

    for part in ("refresh", "after"):
        monkeypatch.setattr(geometry, part, counting(getattr(geometry, part)))
    for routine in ("eigh", "eigvalsh", "qr", "svd"):
        if METHODS[method].recipe.settings.get("polar") is None:
            monkeypatch.setattr(torch.linalg, routine, refuse)
    for step in range(6):
        counts.append(0)
        train(models[1], optimizers[1], range(step, step + 1))
    looks = [1, 0, 1, 0, 1, 0]
    # A basis that is made in this step needs no look where it is made before the step.
    assert counts in (looks, [0, *looks[1:]])
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


class AnyReadBack(ReadBacks, TorchFunctionMode):
    """Also of float64, in which this model computes; sizes are no tensors."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.count += func in (Tensor.tolist, Tensor.item, Tensor.__bool__, Tensor.cpu)
        return func(*args, **(kwargs or {}))
