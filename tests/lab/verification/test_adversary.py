"""The search finds what is there to be found, and nothing else."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gomuon.lab.verification.adversary import Case, Effort, attack
from gomuon.lab.verification.unknowns import Distribution, FactorMatrix, Fixed, Numbers, Rotation

CPU = torch.device("cpu")
EFFORT = Effort(CPU, seeds=2, rounds=60)


def rosenbrock(point: Tensor) -> Tensor:
    """A curved valley; the lowest point is 0 at (1, 1, 1)."""
    x, y = point[:, :-1], point[:, 1:]
    return (100 * (y - x.square()).square() + (1 - x).square()).sum(-1)


def found(case: Case, effort: Effort = EFFORT, *, exists: bool = False, name: str = "") -> float:
    return attack(case, effort, effort.generator(name), exists).slack


def test_it_descends_a_curved_valley() -> None:
    few, many = (Effort(CPU, seeds=2, rounds=rounds) for rounds in (5, 200))
    case = Case((Numbers((3,)),), rosenbrock)
    assert 0 <= found(case, many) < 0.05
    assert found(case, many) < found(case, few)


def test_it_attains_bounds_that_are_tight_at_one_kind_of_instance() -> None:
    """‖AB‖ ≤ ‖A‖‖B‖ is attained where the leading eigenvectors meet."""

    def slack(A: object, B: object) -> Tensor:
        X, Y = A.power(1), B.power(1)  # type: ignore[attr-defined]
        return 1 - torch.linalg.matrix_norm(X @ Y, ord=2) / (A.norm * B.norm)  # type: ignore[attr-defined]

    assert -1e-12 <= found(Case((FactorMatrix(3), FactorMatrix(3)), slack)) < 1e-6


def test_it_looks_for_the_clearest_example_where_one_is_enough() -> None:
    """A rotation's trace is at most d."""

    def trace(Q: Tensor) -> Tensor:
        return Q.diagonal(dim1=-2, dim2=-1).sum(-1)

    assert 3 - 1e-4 < found(Case((Rotation(3),), trace), exists=True) <= 3 + 1e-12
    assert -3 - 1e-12 <= found(Case((Rotation(3),), trace)) < -3 + 1e-4


def test_it_says_how_many_instances_it_tried() -> None:
    judged = 0

    def slack(p: Tensor) -> Tensor:
        nonlocal judged
        judged += len(p)
        return p.amax(-1)

    effort = Effort(CPU, seeds=3, rounds=5, tries=8)
    tried = attack(Case((Distribution(3),), slack), effort, effort.generator("")).tried
    assert tried == judged == 2 * 3 * (1 + 5 * 8)


def test_one_instance_is_tried_once() -> None:
    case = Case((Fixed(),), lambda point: point.new_tensor([0.25]))
    result = attack(case, EFFORT, EFFORT.generator(""))
    assert (result.tried, result.slack) == (1, 0.25)


def test_it_is_deterministic_and_statements_are_searched_differently() -> None:
    case = Case((Numbers((4,)),), rosenbrock)
    effort = Effort(CPU, seeds=1, rounds=3)
    assert found(case, effort, name="a") == found(case, effort, name="a")
    assert found(case, effort, name="a") != found(case, effort, name="b")


@pytest.mark.parametrize("exists", [False, True])
def test_not_a_number_breaks_a_statement_and_is_no_example(exists: bool) -> None:
    def sometimes_nan(x: Tensor) -> Tensor:
        return torch.where(x[:, 0] > 0, torch.nan, x[:, 0].abs().clamp_max(1))

    slack = found(Case((Numbers((1,)),), sometimes_nan), exists=exists)
    assert slack == (1 if exists else -math.inf)
    nothing = Case((Numbers((1,)),), lambda x: torch.full_like(x[:, 0], torch.nan))
    assert found(nothing, exists=exists) == -math.inf
