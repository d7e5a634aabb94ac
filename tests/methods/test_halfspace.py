"""The half-space safeguard: idle where the constraint is slack, and no stronger than needed."""

from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from gomuon.functional import inside_only_direction, inverse_root, linalg, polar
from gomuon.lab.costs.recorder import OperationRecorder
from gomuon.methods.halfspace import halfspace_direction
from tests.functional.matrices import (
    Problem,
    distance,
    factors,
    inner,
    matrices,
    normal,
    nuclear,
    operator,
    orthogonal,
    problems,
    random_source,
    repeatable,
    roundoff,
    spectrum,
)

# The paper's counterexample (Section 2.2), where ⟨M, polar(Z)⟩ = −17/√949.
M = torch.tensor([[-1.0, -4.0], [-2.0, -6.0]], dtype=torch.float64)
ROOT = inverse_root(torch.diag(torch.tensor([1 / 9, 9.0], dtype=torch.float64)), 1 / 2)
Z = ROOT @ M @ ROOT


@pytest.mark.parametrize("tau", [0.0, 0.3, 0.9])
def test_a_slack_constraint_changes_nothing(tau: float) -> None:
    # Under identity maps the polar keeps all of ‖M‖_*.
    X = normal(4, 3, random_source(0))
    assert torch.equal(halfspace_direction(X, None, None, tau=tau), polar(X))


@repeatable
@given(problems(min_rank=1), st.sampled_from([0.0, 0.2]))
def test_slack_and_only_slack_gives_inside_only(problem: Problem, tau: float) -> None:
    U = inside_only_direction(problem.M, problem.left, problem.right)
    slack = inner(problem.M, U) - tau * nuclear(problem.M)
    assume(abs(slack) > roundoff(nuclear(problem.M)))
    guarded = halfspace_direction(problem.M, problem.left, problem.right, tau=tau)
    assert torch.equal(guarded, U) == (slack > 0)


@pytest.mark.parametrize("tau", [0.0, 0.25, 0.5, 0.9])
def test_the_counterexample_is_brought_back(tau: float) -> None:
    U = halfspace_direction(M, ROOT, ROOT, tau=tau)
    assert inner(M, U) >= tau * nuclear(M) - roundoff(nuclear(M))
    assert operator(U) <= 1 + roundoff()


def dual_value(score: Tensor, source: Tensor, wanted: float) -> float:
    """Min over λ of ‖Z + λM‖_* − λ·wanted, convex in λ, by narrowing a bracket of its logarithm."""

    def value(exponent: float) -> float:
        multiplier = 10**exponent * unit
        return nuclear(score + multiplier * source) - multiplier * wanted

    unit = float(score.norm() / source.norm())
    low, high = -8.0, 8.0
    for _ in range(80):
        third = (high - low) / 3
        if value(low + third) < value(high - third):
            high -= third
        else:
            low += third
    return value(low)


@pytest.mark.parametrize("tau", [0.0, 0.25, 0.5, 0.9])
def test_the_counterexample_attains_the_dual_value(tau: float) -> None:
    # The best feasible U: weak duality lets none do better, strong duality lets one do as well.
    U = halfspace_direction(M, ROOT, ROOT, tau=tau)
    assert inner(Z, U) == pytest.approx(dual_value(Z, M, tau * nuclear(M)), rel=1e-6)


@repeatable
@given(st.data(), st.sampled_from([0.0, 0.5, 0.9]))
def test_the_multiplier_is_the_smallest_that_suffices(data: st.DataObject, tau: float) -> None:
    shape = data.draw(st.sampled_from([(2, 3), (3, 2), (2, 2), (4, 3)]))
    X = data.draw(matrices(shape, full_rank=True, exponent=1.0))
    right, left = (data.draw(factors(d, exponent=6.0)).power(-1 / 2) for d in reversed(shape))
    score, wanted = left @ X @ right, tau * nuclear(X)
    # Sixty halvings leave λ at its last bit.
    U = halfspace_direction(X, left, right, tau=tau, bisections=60)
    assert inner(X, U) >= wanted - roundoff(nuclear(X))
    # A larger multiplier meets the constraint too, at a lower score.
    unit = float(score.norm() / X.norm())
    for exponent in torch.linspace(-4, 4, 81).tolist():
        rival = polar(score + unit * 10**exponent * X)
        if inner(X, rival) >= wanted:
            assert inner(score, rival) <= inner(score, U) + 1e-6 * nuclear(score)
    # Z + λM of a rectangular source keeps full rank, so its polar moves without a jump and the
    # constraint is met with equality, at the dual's value. Roundoff grows by κ(P_B)κ(P_A) = 1e6.
    if inner(X, polar(score)) < wanted and shape[0] != shape[1]:
        assert inner(X, U) <= wanted + roundoff(1e6, nuclear(X))
        assert inner(score, U) == pytest.approx(dual_value(score, X, wanted), rel=1e-6)


def test_a_batch_guards_only_those_that_need_it() -> None:
    sources = torch.stack([M, torch.zeros_like(M), torch.eye(2, dtype=torch.float64)])
    maps = ROOT.expand(3, 2, 2)
    U = halfspace_direction(sources, maps, maps)
    assert torch.allclose(U[0], halfspace_direction(M, ROOT, ROOT), rtol=0, atol=1e-12)
    assert not U[1].any()
    assert torch.allclose(U[2], torch.eye(2, dtype=torch.float64), rtol=0, atol=1e-14)


def test_halvings_close_in_from_the_side_that_is_safe() -> None:
    X, tau = normal(2, 3, random_source(1)), 0.99
    root, wanted = torch.diag(torch.tensor([1.0, 50.0], dtype=torch.float64)), tau * nuclear(X)
    assert inner(X, polar(root @ X)) < wanted
    excess = [
        inner(X, halfspace_direction(X, root, None, tau=tau, bisections=count)) - wanted
        for count in (0, 10, 40)
    ]
    assert min(excess) >= -roundoff(nuclear(X))
    assert excess[-1] <= 1e-10
    # The default of thirty places λ to 1e-9 of its bracket.
    assert inner(X, halfspace_direction(X, root, None, tau=tau)) <= wanted + 1e-7


@pytest.mark.parametrize("maps", [(None, ROOT), (ROOT, None)])
def test_one_map_alone(maps: tuple[Tensor | None, Tensor | None]) -> None:
    assert torch.equal(halfspace_direction(M, *maps), inside_only_direction(M, *maps))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("method", ["svd", "exact", "fast"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_half_space_search_ends(method: Any, dtype: torch.dtype) -> None:
    source = torch.Generator().manual_seed(0)
    X = torch.randn(20, 6, 6, generator=source, dtype=dtype)
    X = X @ X.mT @ X @ X.mT  # small singular values stay below one under an approximate polar
    left = torch.diag(torch.tensor([1e-3, 1, 1, 1, 1, 1e3], dtype=dtype))
    for tau in (0.999, 1 - 1e-7, 1 - 1e-15):
        U = halfspace_direction(X, left, left, tau=tau, polar_method=method)
        assert U.isfinite().all()
        kept = (X * U).sum((-2, -1)) / torch.linalg.matrix_norm(X, ord="nuc")
        assert kept.min() > 0.99


@pytest.mark.timeout(60)
@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1e15])
def test_the_half_space_search_begins_at_any_scale(scale: float) -> None:
    X = torch.tensor([[-1.0, -4.0], [-2.0, -6.0]])
    root = torch.diag(torch.tensor([3.0, 1 / 3]))
    U = halfspace_direction(scale * X, root, root, tau=0.5)
    torch.testing.assert_close(U, halfspace_direction(X, root, root, tau=0.5), rtol=0, atol=1e-3)


# ---- the form of accelerators, which are never asked ---------------------------------------------


def drawn(dtype: torch.dtype, ratio: float) -> tuple[Tensor, Tensor, Tensor]:
    """Sources [24, 8, 12] and maps B^(−1/2), A^(−1/2) of factors with this condition number."""
    source = random_source(3)

    def power(d: int, largest: float, exponent: float) -> Tensor:
        made = [(orthogonal(d, source), spectrum(d, largest, source)) for _ in range(24)]
        return torch.stack([(V * values**exponent) @ V.mT for V, values in made])

    X = torch.stack([normal(8, 12, source) for _ in range(24)]) @ power(12, 100.0, 0.5)
    return X.to(dtype), power(8, ratio, -0.5).to(dtype), power(12, ratio, -0.5).to(dtype)


@pytest.mark.parametrize("tau", [0.0, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("ratio", [1e2, 1e4])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-6)])
def test_accelerators_get_the_same_direction(
    tau: float, ratio: float, dtype: torch.dtype, bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    X, left, right = drawn(dtype, ratio)
    exact = halfspace_direction(X, left, right, tau=tau, polar_method="exact")
    monkeypatch.setattr(linalg, "decomposes_well", lambda device: False)
    with OperationRecorder() as record:
        found = halfspace_direction(X, left, right, tau=tau, polar_method="exact")
    assert not [x for x in record.operations if x.waits]
    assert float((found - exact).norm(dim=(-2, -1)).max()) < bound * 8**0.5
    kept = (X * found).sum((-2, -1)) / torch.linalg.matrix_norm(X, ord="nuc")
    assert float(kept.min()) >= tau - 1e-6
    assert float(torch.linalg.matrix_norm(found, ord=2).max()) <= 1 + 1e-6


def test_some_of_these_violate_the_constraint_and_some_do_not() -> None:
    X, left, right = drawn(torch.float64, 1e2)
    kept = (X * polar(left @ X @ right)).sum((-2, -1)) / torch.linalg.matrix_norm(X, ord="nuc")
    assert float(kept.min()) < 0.9 < float(kept.max())


@pytest.mark.parametrize("tau", [0.0, 0.25, 0.5, 0.9])
def test_accelerators_bring_the_counterexample_back_as_well(
    tau: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = halfspace_direction(M, ROOT, ROOT, tau=tau)
    monkeypatch.setattr(linalg, "decomposes_well", lambda device: False)
    # The polar jumps over the constraint, so the direction is as near as the angle.
    for bisections, bound in ((0, 2.0), (None, 5e-5), (30, 1e-8)):
        U = halfspace_direction(M, ROOT, ROOT, tau=tau, bisections=bisections)
        assert inner(M, U) >= tau * nuclear(M) - roundoff(nuclear(M))
        assert operator(U) <= 1 + roundoff()
        assert distance(U, exact) < bound
    assert not halfspace_direction(torch.zeros_like(M), ROOT, ROOT, tau=tau).any()


@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1e15])
def test_on_accelerators_the_scale_does_not_matter_either(
    scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linalg, "decomposes_well", lambda device: False)
    X = torch.tensor([[-1.0, -4.0], [-2.0, -6.0]])
    root = torch.diag(torch.tensor([3.0, 1 / 3]))
    U = halfspace_direction(scale * X, root, root, tau=0.5)
    torch.testing.assert_close(U, halfspace_direction(X, root, root, tau=0.5), rtol=0, atol=1e-3)
