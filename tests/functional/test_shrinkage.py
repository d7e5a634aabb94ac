"""OAS against the paper's formula in exact arithmetic, and its edges."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gomuon.functional import oas, shrink, theory
from tests.functional.matrices import (
    condition,
    normal,
    random_source,
    repeatable,
    roundoff,
    seeds,
    spectrum,
)


def second_moment(n: int, d: int, ratio: float, seed: int) -> Tensor:
    """XᵀX/n of n normal samples whose coordinates differ in scale by `ratio`."""
    source = random_source(seed)
    X = normal(n, d, source) * spectrum(d, ratio, source)
    return X.T @ X / n


def paper_intensity(S: Tensor, n: int) -> float:
    """λ(S, N) in rationals, entry by entry, with no rounding at all."""
    d = len(S)
    entries = [[Fraction(value) for value in row] for row in S.tolist()]
    trace = sum((entries[i][i] for i in range(d)), Fraction())
    square = Fraction()
    for i in range(d):
        for j in range(d):
            square += entries[i][j] * entries[j][i]
    share = Fraction(2, d)
    ratio = ((1 - share) * square + trace**2) / ((n + 1 - share) * (square - trace**2 / d))
    return float(min(max(ratio, Fraction(0)), Fraction(1)))


@repeatable
@given(st.integers(1, 300), st.integers(2, 7), st.floats(0, 4), st.floats(-6, 6), seeds)
def test_intensity_and_matrix_are_the_papers(
    n: int, d: int, exponent: float, scale: float, seed: int
) -> None:
    S = 10**scale * second_moment(n, d, 10**exponent, seed)
    shrunk, intensity = oas(S, n)
    wanted = paper_intensity(S, n)
    # The formula has no cancellation left once tr(S²) − tr(S)²/d is one sum of squares; S itself
    # is symmetric to roundoff.
    assert float(intensity) == pytest.approx(wanted, rel=roundoff())
    mean = sum(float(S[i, i]) for i in range(d)) / d
    for i in range(d):
        for j in range(d):
            value = (1 - wanted) * float(S[i, j]) + (wanted * mean if i == j else 0.0)
            assert float(shrunk[i, j]) == pytest.approx(value, abs=roundoff(float(S.abs().max())))


def test_the_clip_is_reached_from_both_sides() -> None:
    # Few samples of an isotropic law: clipped. Many of an anisotropic one: not.
    clipped, free = second_moment(2, 5, 1.0, 0), second_moment(500, 5, 100.0, 0)
    free_intensity = float(oas(free, 500)[1])
    assert float(oas(torch.eye(5) + 0.01 * clipped.float(), 2)[1]) == 1.0
    assert paper_intensity(free, 500) < 0.1
    assert free_intensity == pytest.approx(paper_intensity(free, 500), rel=1e-13)
    # diag(3, 1) by hand: λ = 16/((n+1−1)·2) = 8/n for d = 2, clipped up to n = 8.
    S = torch.diag(torch.tensor([3.0, 1.0], dtype=torch.float64))
    for n, wanted in [(1, 1.0), (7, 1.0), (8, 1.0), (9, 8 / 9), (16, 0.5), (64, 0.125)]:
        assert float(oas(S, n)[1]) == pytest.approx(wanted, rel=1e-14)


def test_the_trace_survives_and_full_shrinkage_is_isotropic() -> None:
    S = second_moment(30, 6, 10.0, 1)
    shrunk, intensity = oas(S, 30)
    assert 0 < float(intensity) < 1
    assert float(shrunk.trace()) == pytest.approx(float(S.trace()), rel=1e-14)
    shrunk, intensity = oas(torch.diag(torch.tensor([3.0, 1.0])), 1)
    assert float(intensity) == 1
    assert torch.equal(shrunk, 2 * torch.eye(2))


@pytest.mark.parametrize(
    "S",
    [
        torch.tensor([[7.0]]),
        torch.tensor([[0.0]]),
        torch.zeros(4, 4),
        torch.eye(4),
        0.3 * torch.eye(5, dtype=torch.float64),
        1e-30 * torch.eye(3),
    ],
    ids=["1x1", "1x1 zero", "zero", "identity", "multiple", "tiny multiple"],
)
def test_a_vanishing_denominator_gives_the_matrix_back(S: Tensor) -> None:
    shrunk, intensity = oas(S, 10)
    assert torch.allclose(shrunk, S, rtol=4 * torch.finfo(S.dtype).eps, atol=0)
    assert float(intensity) == 1
    assert (shrunk.dtype, intensity.dtype) == (S.dtype, S.dtype)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_the_intensity_does_not_see_the_scale(scale: float) -> None:
    S = second_moment(50, 4, 30.0, 2)
    shrunk, intensity = oas((scale * S).float(), 50)
    wanted, wanted_intensity = oas(S, 50)
    assert float(intensity) == pytest.approx(float(wanted_intensity), rel=1e-5)
    assert torch.allclose(shrunk.double() / scale, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_batch_takes_a_count_for_each_matrix(dtype: torch.dtype) -> None:
    S = torch.stack([second_moment(20, 4, 10.0, seed) for seed in range(3)]).to(dtype)
    counts = [1, 40, 900]
    shrunk, intensity = oas(S, torch.tensor(counts))
    assert (shrunk.dtype, intensity.dtype, intensity.shape) == (dtype, dtype, (3,))
    for i, n in enumerate(counts):
        alone, alone_intensity = oas(S[i], n)
        assert torch.allclose(shrunk[i], alone, rtol=1e-6, atol=1e-7)
        assert float(intensity[i]) == pytest.approx(float(alone_intensity), rel=1e-6)
    # One count for all is the same as repeating it.
    assert torch.equal(oas(S, 40)[1], oas(S, torch.full((3,), 40))[1])


@pytest.mark.parametrize("n", [0, 0.5, -3, float("nan")])
def test_fewer_than_one_sample_is_refused(n: float) -> None:
    with pytest.raises(ValueError, match="n >= 1"):
        oas(torch.eye(2), n)


@pytest.mark.parametrize("shape", [(2, 3), (4,), (5, 3, 2)])
def test_anything_but_square_matrices_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="square"):
        oas(torch.ones(shape), 2)


@repeatable
@given(st.integers(1, 60), st.integers(2, 7), st.floats(0, 4), seeds)
def test_the_condition_bound_holds(n: int, d: int, exponent: float, seed: int) -> None:
    # n < d gives singular moments, for which the bound is what makes the inverse root safe.
    shrunk, intensity = oas(second_moment(n, d, 10**exponent, seed), n)
    bound = float(theory.oas_condition_bound(d, intensity))
    assert condition(shrunk) <= bound * (1 + roundoff(bound))


@repeatable
@given(st.integers(2, 7), st.floats(0.01, 1), seeds)
def test_the_condition_bound_is_attained_at_rank_one(d: int, intensity: float, seed: int) -> None:
    bound = float(theory.oas_condition_bound(d, intensity))
    S = second_moment(1, d, 1.0, seed)
    assert condition(shrink(S, intensity)) == pytest.approx(bound, rel=roundoff(bound))


def test_shrink_mixes_linearly() -> None:
    S = second_moment(9, 3, 10.0, 3)
    mean = float(S.trace()) / 3 * torch.eye(3, dtype=torch.float64)
    assert torch.equal(shrink(S, 0.0), S)
    assert torch.allclose(shrink(S, 1.0), mean, rtol=1e-15, atol=0)
    assert torch.allclose(shrink(S, 0.25), 0.75 * S + 0.25 * mean, rtol=1e-14, atol=0)
    each = shrink(torch.stack([S, 2 * S]), torch.tensor([1.0, 0.0]))
    assert torch.allclose(each, torch.stack([mean, 2 * S]), rtol=1e-15, atol=0)
