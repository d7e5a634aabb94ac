"""How near the step of cached maps is to that of fresh ones."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gomuon.functional import (
    frobenius_graft,
    inverse_root,
    matched_direction,
    oas,
    theory,
    weighted_norm,
)
from gomuon.functional.oracle import step_efficiency
from tests.functional.matrices import (
    Problem,
    condition,
    factors,
    inner,
    normal,
    orthogonal,
    problems,
    random_source,
    repeatable,
    roundoff,
)


@repeatable
@given(problems(min_rank=1), st.data())
def test_it_is_the_cosine_of_the_grafted_steps(problem: Problem, data: st.DataObject) -> None:
    m, n = problem.M.shape
    cached = (
        data.draw(factors(m)).power(-problem.alpha),
        data.draw(factors(n)).power(-problem.alpha),
    )
    fresh = problem.left, problem.right
    D, old = (frobenius_graft(matched_direction(problem.M, *maps)) for maps in (fresh, cached))
    found = float(step_efficiency(problem.M, cached, fresh))
    slack = roundoff(problem.map_condition, *map(condition, cached))
    assert found == pytest.approx(inner(old, D) / (old.norm() * D.norm()).item(), abs=slack + 1e-12)
    # Both have one length, so the cosine says how far they are apart.
    apart = float((D - old).norm() / D.norm())
    assert apart**2 == pytest.approx(2 - 2 * found, abs=slack + 1e-9)
    assert float(step_efficiency(problem.M, fresh, cached)) == pytest.approx(found, abs=1e-12)


@repeatable
@given(problems(min_rank=1), st.floats(-3, 3), st.floats(-3, 3))
def test_scalars_change_nothing(problem: Problem, a: float, b: float) -> None:
    cached = 10**a * problem.left, 10**b * problem.right
    # What "svd" makes of a null space may change.
    fresh = problem.left, problem.right
    found = step_efficiency(problem.M, cached, fresh, polar_method="exact")
    assert float(found) == pytest.approx(1, abs=roundoff(problem.map_condition))


def test_it_is_batched_takes_the_identity_and_says_nothing_of_no_source() -> None:
    source = random_source(0)
    M = torch.stack([normal(4, 3, source), torch.zeros(4, 3, dtype=torch.float64)])
    P = torch.diag(torch.arange(1.0, 5.0, dtype=torch.float64)).expand(2, 4, 4)
    found = step_efficiency(M, (P, None), (None, None), polar_method="exact")
    assert found.shape == (2,)
    assert 0 < float(found[0]) < 1
    assert found[1].isnan()


def maps_of(rows: Tensor) -> Tensor:
    S, _ = oas(rows.mT @ rows / len(rows), len(rows))
    return inverse_root(S, 0.25)


@pytest.mark.parametrize("seed", range(5))
def test_between_two_batches_the_cosine_is_near_one_where_the_oracles_share_is_not(
    seed: int,
) -> None:
    """Nothing has drifted: what is below one is noise, and the worst direction has most of it."""
    source = random_source(seed)
    d, number = 32, 256
    spread = torch.logspace(0, -1.5, d, dtype=torch.float64)[:, None] * orthogonal(d, source)
    M = normal(d, d, source)
    cached, fresh = (
        tuple(maps_of(normal(number, d, source) @ spread) for _ in range(2)) for _ in range(2)
    )
    D = matched_direction(M, *cached)
    share = inner(M, D) / float(weighted_norm(D, *fresh) * theory.oracle_value(M, *fresh))
    cosine = float(step_efficiency(M, (cached[0], cached[1]), (fresh[0], fresh[1])))
    assert cosine > 0.97
    assert share < 0.85
    assert share >= float(theory.cached_efficiency_bound(*fresh, *cached))
