"""Statements that are watched while the optimizer trains."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import gomuon
from gomuon.functional import oracle, polar_factor
from gomuon.lab.verification import live_checks, live_run
from gomuon.lab.verification.every_statement import STATEMENTS
from gomuon.lab.verification.known_labels import (
    CLASSES,
    HIDDEN,
    POPULATION,
    KnownLabels,
    network,
    true_factors,
)
from gomuon.lab.verification.live_checks import CHECKS, OF_A_RUN, Tally, watch
from gomuon.recipes import stations

CPU = torch.device("cpu")
ALLOWED = {statement.name: statement.allowed for statement in STATEMENTS}
SHORT = 24  # steps; enough for everything but the limit of Corollary 4


def failing(watched: dict[str, Tally]) -> set[str]:
    return {name for name, tally in watched.items() if not tally.slack >= -ALLOWED[name]}


def test_everything_is_watched_and_holds() -> None:
    watched = watch(CPU, 1)
    assert set(watched) == {*CHECKS, *OF_A_RUN} <= set(ALLOWED)
    assert failing(watched) == set()
    steps, refreshes = live_run.STEPS, live_run.STEPS // 4
    assert watched["matched oracle"].count == 2 * steps  # two layers
    assert watched["cached geometry"].count == 2 * (steps - refreshes)
    # The four steps of every geometry are judged by the next one.
    assert watched["cached oracle under drift"].count == 2 * 4 * (refreshes - 1)
    assert watched["mismatch ≤ 3‖q − p‖"].count == steps * POPULATION
    assert all(tally.count >= refreshes for tally in watched.values())


def inside_only(
    M: Tensor, left: Tensor, right: Tensor, *, polar_method: Any = "svd"
) -> tuple[Tensor, Tensor]:
    Q = oracle.inside_only_direction(M, left, right, polar_method=polar_method)
    return Q, polar_factor.rank_of(Q)


def without_right(M: Tensor, left: Tensor, right: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    Q, rank = inside_only(M, left, right, **options)
    return left @ Q, rank


def without_left(M: Tensor, left: Tensor, right: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    Q, rank = inside_only(M, left, right, **options)
    return Q @ right, rank


@pytest.mark.parametrize("broken", [inside_only, without_right, without_left])
def test_a_broken_map_back_of_the_optimizer_is_noticed(
    broken: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_run, "STEPS", SHORT)
    monkeypatch.setattr(stations, "matched_direction", broken)
    noticed = failing(watch(CPU, 1))
    assert {"matched oracle", "cached geometry", "scalar invariance"} <= noticed
    assert "root maps" not in noticed, "the maps are as they should be"


def test_a_wrong_factor_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fixed intensity instead of OAS."""
    monkeypatch.setattr(live_run, "GoMuon", partial(gomuon.GoMuon, shrinkage=0.001))
    monkeypatch.setattr(live_run, "STEPS", SHORT)
    wanted = {"root maps", "complete update", "condition number after OAS"}
    assert wanted <= failing(watch(CPU, 1))


def test_a_missing_graft_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stations, "frobenius_graft", lambda D, rank: D)
    monkeypatch.setattr(live_run, "STEPS", SHORT)
    noticed = failing(watch(CPU, 1))
    assert "graft keeps the ray" in noticed
    assert "matched oracle" not in noticed, (
        "the oracle's direction is right, only its length is not"
    )


def test_a_model_that_does_not_learn_is_not_consistent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Corollary 4 asks for predictions that approach the data; more samples alone do not help."""
    monkeypatch.setattr(live_run, "LR", 1e-3)
    assert failing(watch(CPU, 1)) == {"factor consistency"}


@pytest.mark.parametrize("name", ["four parts of factor error", "cached oracle under drift"])
def test_a_wrong_bound_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    theory = live_checks.theory
    terms, share = theory.factor_error_terms, theory.cached_efficiency_bound
    monkeypatch.setattr(live_run, "STEPS", SHORT)
    monkeypatch.setattr(theory, "factor_error_terms", lambda *X: 0.3 * terms(*X))
    monkeypatch.setattr(theory, "cached_efficiency_bound", lambda *P: 1 / share(*P))
    assert name in failing(watch(CPU, 1))


def test_a_run_is_deterministic_and_steps_are_the_optimizers_own() -> None:
    first, second = (next(iter(live_run.run(CPU, 0))) for _ in range(2))
    assert torch.equal(first[0].direction, second[0].direction)
    assert first[0].refreshed
    assert first[0].direction.shape == (HIDDEN, 6)
    assert first[1].direction.shape == (CLASSES, HIDDEN)
    assert float(first[1].deltas.sum(1).abs().max()) < 1e-14, "the logits' δ adds up to zero"


def test_true_factors_are_those_of_the_autograd_jacobian() -> None:
    generator = torch.Generator().manual_seed(3)
    data = KnownLabels.drawn(generator, CPU)
    model = network(generator, CPU)
    first, last = true_factors(model, data)
    fisher = torch.zeros(HIDDEN, HIDDEN, dtype=torch.float64)
    observed = torch.zeros(HIDDEN, HIDDEN, dtype=torch.float64)
    for x, q in zip(data.inputs, data.q, strict=True):
        z = model[0](x).detach().requires_grad_()
        p = model[2](model[1](z)).softmax(-1).detach()
        for y in range(CLASSES):
            loss = torch.nn.functional.cross_entropy(model[2](model[1](z)), torch.tensor(y))
            (delta,) = torch.autograd.grad(loss, z)
            fisher += p[y] * torch.outer(delta, delta) / POPULATION
            observed += q[y] * torch.outer(delta, delta) / POPULATION
    torch.testing.assert_close(first.fisher, fisher)
    torch.testing.assert_close(first.observed, observed)
    assert last.fisher.shape == (CLASSES, CLASSES)


def test_a_tally_keeps_the_worst_and_not_a_number() -> None:
    tally = Tally()
    for slack in ([0.5, 0.25], [0.75]):
        tally.add(torch.tensor(slack))
    assert (tally.count, tally.slack) == (3, 0.25)
    tally.add(torch.tensor(math.nan))
    tally.add(torch.tensor(-1.0))
    assert math.isnan(tally.slack)
