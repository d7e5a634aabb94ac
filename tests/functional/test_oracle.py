"""Theorem 1, its controls, and the invariances and bounds of the grafted direction."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gomuon.functional import (
    frobenius_graft,
    inside_only_direction,
    inverse_root,
    matched_direction,
    polar,
    polar_express,
    theory,
    weighted_norm,
)
from gomuon.functional.polar_factor import PolarMethod
from tests.functional.matrices import (
    Problem,
    condition,
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
    seeds,
)

# The paper's counterexample (Section 2.2): A = B = diag(1/9, 9), so A^(−1/2) = diag(3, 1/3).
COUNTEREXAMPLE = torch.tensor([[-1.0, -4.0], [-2.0, -6.0]], dtype=torch.float64)
FACTOR = torch.diag(torch.tensor([1 / 9, 9.0], dtype=torch.float64))


def grafted(M: Tensor, A: Tensor, B: Tensor, alpha: float, method: PolarMethod = "svd") -> Tensor:
    """D̂_α of Equation (14), from the factors."""
    D = matched_direction(M, inverse_root(B, alpha), inverse_root(A, alpha), polar_method=method)
    return frobenius_graft(D)


@repeatable
@given(problems(min_rank=1))
def test_the_value_is_the_nuclear_norm_of_C(problem: Problem) -> None:
    D = matched_direction(problem.M, problem.left, problem.right)
    # ⟨M, D₀⟩ sums terms as large as ‖P_B‖‖M‖‖P_A‖, which is at most κ(P_B)κ(P_A)·‖C‖.
    wanted = pytest.approx(nuclear(problem.C), rel=roundoff(problem.map_condition))
    assert inner(problem.M, D) == wanted
    assert float(theory.oracle_value(problem.M, problem.left, problem.right)) == wanted


@repeatable
@given(problems(min_rank=1))
def test_the_direction_touches_the_unit_ball(problem: Problem) -> None:
    D = matched_direction(problem.M, problem.left, problem.right)
    # One from above is feasibility, one from below is that the whole budget is used.
    assert float(weighted_norm(D, problem.left, problem.right)) == pytest.approx(
        1, abs=roundoff(problem.map_condition)
    )


@repeatable
@given(problems(min_rank=1), seeds)
def test_no_feasible_point_does_better(problem: Problem, seed: int) -> None:
    best = inner(problem.M, matched_direction(problem.M, problem.left, problem.right))
    m, n = problem.M.shape
    U = normal(m, n, random_source(seed))
    for rival in (U / operator(U), polar(U), polar(problem.M), -polar(problem.C)):
        D = problem.left @ rival @ problem.right
        assert inner(problem.M, D) <= best * (1 + roundoff(problem.map_condition))


@repeatable
@given(problems(), seeds)
def test_weighted_norm_is_its_definition(problem: Problem, seed: int) -> None:
    m, n = problem.M.shape
    D = normal(m, n, random_source(seed))
    # The inverse maps B^α and A^α come from the drawn spectra, not from a solve.
    inverse_left, inverse_right = problem.B.power(problem.alpha), problem.A.power(problem.alpha)
    tolerance = roundoff(problem.map_condition)
    for left, right, wanted in (
        (problem.left, problem.right, inverse_left @ D @ inverse_right),
        (problem.left, None, inverse_left @ D),
        (None, problem.right, D @ inverse_right),
        (None, None, D),
    ):
        got = float(weighted_norm(D, left, right))
        assert got == pytest.approx(operator(wanted), rel=tolerance)


def test_inside_only_turns_away_from_the_source() -> None:
    root = inverse_root(FACTOR, 1 / 2)
    U = inside_only_direction(COUNTEREXAMPLE, root, root)
    wanted = torch.tensor([[-25.0, -18.0], [-18.0, 25.0]], dtype=torch.float64) / math.sqrt(949)
    assert torch.allclose(U, wanted, rtol=0, atol=1e-12)
    assert inner(COUNTEREXAMPLE, U) == pytest.approx(-17 / math.sqrt(949), abs=1e-12)


def test_the_map_back_turns_towards_it() -> None:
    root = inverse_root(FACTOR, 1 / 2)
    # ‖Z‖_*² = ‖Z‖_F² + 2|det Z| = 949/9 for the 2×2 score Z.
    D = matched_direction(COUNTEREXAMPLE, root, root)
    assert inner(COUNTEREXAMPLE, D) == pytest.approx(math.sqrt(949) / 3, rel=1e-12)
    assert inner(COUNTEREXAMPLE, grafted(COUNTEREXAMPLE, FACTOR, FACTOR, 1 / 4)) > 0


@repeatable
@given(matrices(full_rank=True))
def test_identity_maps_give_muon(M: Tensor) -> None:
    m, n = M.shape
    assert torch.equal(matched_direction(M, None, None), polar(M))
    assert torch.equal(inside_only_direction(M, None, None), polar(M))
    left, right = (torch.eye(d, dtype=torch.float64) for d in (m, n))
    assert torch.equal(matched_direction(M, left, right), polar(M))
    # A full-rank polar already has Muon's energy, so the graft leaves it.
    assert distance(frobenius_graft(polar(M)), polar(M)) <= roundoff()


@repeatable
@given(problems(full_rank=True, share=True))
def test_power_zero_gives_muon_whatever_the_factors(problem: Problem) -> None:
    D = grafted(problem.M, problem.A.power(1), problem.B.power(1), 0.0)
    # The polar of a perturbed matrix moves by the perturbation over the least singular value.
    assert distance(D, polar(problem.M)) <= roundoff(condition(problem.M))


@repeatable
@given(matrices(min_rank=1))
def test_the_graft_sets_the_energy_and_keeps_the_ray(D: Tensor) -> None:
    G = frobenius_graft(D)
    assert float(G.norm()) == pytest.approx(math.sqrt(min(D.shape)), rel=roundoff())
    assert distance(G / G.norm(), D / D.norm()) <= roundoff()


@pytest.mark.parametrize("direction", [matched_direction, inside_only_direction])
def test_a_zero_source_gives_zero_alone_and_in_a_batch(
    direction: Callable[[Tensor, Tensor | None, Tensor | None], Tensor],
) -> None:
    M = normal(6, 3, random_source(0)).view(2, 3, 3).clone()
    M[0] = 0
    D = frobenius_graft(direction(M, None, None))
    assert not D[0].any()
    assert torch.allclose(D[1], frobenius_graft(direction(M[1], None, None)), rtol=0, atol=1e-14)
    assert not frobenius_graft(direction(M[0], None, None)).any()


@repeatable
@given(problems(full_rank=True, share=True), st.floats(-6, 6), st.floats(-6, 6))
def test_scaling_either_factor_changes_nothing(problem: Problem, a: float, b: float) -> None:
    A, B = problem.A.power(1), problem.B.power(1)
    plain = grafted(problem.M, A, B, problem.alpha)
    scaled = grafted(problem.M, 10**a * A, 10**b * B, problem.alpha)
    # Rounding a factor by ε moves its root by εκ, and the polar by that times κ(C).
    assert distance(scaled, plain) <= roundoff(problem.factor_condition, condition(problem.C))


@repeatable
@given(problems(full_rank=True, share=True), seeds)
def test_a_change_of_bases_is_followed(problem: Problem, seed: int) -> None:
    U, V = (orthogonal(d, random_source(seed)) for d in problem.M.shape)
    A, B = problem.A.power(1), problem.B.power(1)
    plain = grafted(problem.M, A, B, problem.alpha)
    turned = grafted(U @ problem.M @ V.T, V @ A @ V.T, U @ B @ U.T, problem.alpha)
    wanted = U @ plain @ V.T
    assert distance(turned, wanted) <= roundoff(problem.factor_condition, condition(problem.C))


@repeatable
@given(st.data(), st.integers(2, 6), st.integers(2, 6), seeds)
def test_the_canonical_polar_follows_at_rank_deficiency_too(
    data: st.DataObject, m: int, n: int, seed: int
) -> None:
    source = random_source(seed)
    # An exact rank-one source, and maps tame enough (κ = 100^¼) that the roundoff of P_B M P_A
    # stays below the numerical rank's floor.
    column = torch.randint(1, 9, (m, 1), generator=source, dtype=torch.float64)
    M = column @ torch.ones(1, n, dtype=torch.float64)
    A, B = (data.draw(factors(d, exponent=2.0)).power(1) for d in (n, m))
    U, V = orthogonal(m, source), orthogonal(n, source)
    plain = grafted(M, A, B, 1 / 4, "canonical")
    turned = grafted(U @ M @ V.T, V @ A @ V.T, U @ B @ U.T, 1 / 4, "canonical")
    # κ₊(C) of a rank-one source is one.
    assert distance(turned, U @ plain @ V.T) <= roundoff(condition(A), condition(B))


@pytest.mark.parametrize("shape", [(48, 48), (96, 40), (40, 96)], ids=str)
def test_mapping_a_fast_polar_factor_back_in_bfloat16_adds_little(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every processor can multiply bfloat16; the map back stays within the fast form's .01."""
    source = random_source(4)
    M = normal(*shape, source).float()
    left, right = (inverse_root(_factor(d, source), 0.25).float() for d in shape)
    found = {}
    for native in (False, True):
        monkeypatch.setattr(polar_express, "multiplies_bfloat16", lambda device, n=native: n)
        found[native] = matched_direction(M, left, right, polar_method="fast").double()
    exact = matched_direction(M.double(), left.double(), right.double())
    assert 0 < distance(found[True], found[False]) <= 0.01
    assert distance(found[True], exact) <= 0.01
    monkeypatch.setattr(polar_express, "multiplies_bfloat16", lambda device: True)
    assert distance(matched_direction(M, left, right, polar_method="exact").double(), exact) <= 1e-5


def _factor(d: int, source: torch.Generator) -> Tensor:
    X = normal(d, 2 * d, source)
    return X @ X.T / d
