"""The paper's bounds and numbers, against direct computation."""

import cmath
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gomuon.functional import (
    frobenius_graft,
    inverse_root,
    matched_direction,
    theory,
    weighted_norm,
)
from tests.functional.matrices import (
    Factor,
    Problem,
    condition,
    factors,
    inner,
    normal,
    nuclear,
    operator,
    problems,
    random_source,
    repeatable,
    roundoff,
    seeds,
)


@repeatable
@given(problems(min_rank=1))
def test_both_bounds_of_the_conditioning_proposition(problem: Problem) -> None:
    A, B = problem.A.power(1), problem.B.power(1)
    left, right = inverse_root(B, problem.alpha), inverse_root(A, problem.alpha)
    D = frobenius_graft(matched_direction(problem.M, left, right))
    # The roots carry εκ(A) + εκ(B); the least singular value of D carries εK_AB^α.
    conditions = problem.A.condition + problem.B.condition + problem.map_condition
    slack = roundoff(conditions)
    bound = float(theory.grafted_alignment_bound(A, B, problem.M, problem.alpha))
    assert inner(problem.M, D) >= bound * (1 - slack)
    # The compact polar leaves k nonzero singular values, so κ₊ is σ₁/σ_k at every rank of M.
    assert condition(D) <= float(theory.grafted_condition_bound(A, B, problem.alpha)) * (1 + slack)


@repeatable
@given(problems(min_rank=1))
def test_the_bounds_are_the_powers_of_K_AB(problem: Problem) -> None:
    A, B = problem.A.power(1), problem.B.power(1)
    slack = roundoff(problem.A.condition + problem.B.condition)
    bound = float(theory.grafted_condition_bound(A, B, problem.alpha))
    assert bound == pytest.approx(problem.factor_condition**problem.alpha, rel=slack)
    alignment = float(theory.grafted_alignment_bound(A, B, problem.M, problem.alpha))
    assert alignment == pytest.approx(nuclear(problem.M) / bound, rel=slack)
    assert float(theory.condition_number(A)) == pytest.approx(problem.A.condition, rel=slack)


def test_aligned_factors_attain_the_condition_bound() -> None:
    A = torch.diag(torch.tensor([1.0, 16.0], dtype=torch.float64))
    B = torch.diag(torch.tensor([1.0, 81.0], dtype=torch.float64))
    D = matched_direction(
        torch.eye(2, dtype=torch.float64), inverse_root(B, 1 / 4), inverse_root(A, 1 / 4)
    )
    assert condition(D) == pytest.approx(6, rel=1e-12)
    assert float(theory.grafted_condition_bound(A, B, 1 / 4)) == pytest.approx(6, rel=1e-12)


@repeatable
@given(problems())
def test_the_root_fisher_norm_is_the_kronecker_form(problem: Problem) -> None:
    vec = problem.M.T.reshape(-1)  # stacks columns
    form = float(vec @ torch.kron(problem.A.power(1 / 2), problem.B.power(1 / 2)) @ vec)
    got = theory.root_fisher_norm(problem.M, problem.A.power(1), problem.B.power(1))
    slack = roundoff(problem.A.condition + problem.B.condition, problem.factor_condition**0.5)
    assert float(got) ** 2 == pytest.approx(form, rel=slack)


def test_the_root_fisher_norm_of_singular_factors_and_of_a_batch() -> None:
    D = torch.ones(2, 2, 3, dtype=torch.float64)
    A = torch.diag(torch.tensor([16.0, 0.0, 0.0], dtype=torch.float64))
    B = torch.diag(torch.tensor([0.0, 81.0], dtype=torch.float64))
    assert theory.root_fisher_norm(D, A, B).tolist() == pytest.approx([6.0, 6.0], rel=1e-14)
    assert float(theory.root_fisher_norm(D[0], 0 * A, B)) == 0


@repeatable
@given(problems(min_rank=1), st.data())
def test_a_cached_direction_keeps_its_share(problem: Problem, data: st.DataObject) -> None:
    m, n = problem.M.shape
    cached_left = data.draw(factors(m)).power(-problem.alpha)
    cached_right = data.draw(factors(n)).power(-problem.alpha)
    D = matched_direction(problem.M, cached_left, cached_right)
    best = float(theory.oracle_value(problem.M, problem.left, problem.right))
    shares = [
        inner(problem.M, cached)
        / (float(weighted_norm(cached, problem.left, problem.right)) * best)
        for cached in (D, frobenius_graft(D), 1e3 * D)
    ]
    bound = float(
        theory.cached_efficiency_bound(problem.left, problem.right, cached_left, cached_right)
    )
    # The value of the cached oracle and the current norm each pass through a pair of maps.
    slack = roundoff(problem.map_condition, condition(cached_left), condition(cached_right))
    assert bound * (1 - slack) <= shares[0] <= 1 + slack
    assert shares[1:] == pytest.approx(shares[:1] * 2, rel=roundoff(problem.map_condition))


@repeatable
@given(problems(min_rank=1), st.floats(-3, 3), st.floats(-3, 3))
def test_a_cache_off_by_scalars_keeps_everything(problem: Problem, a: float, b: float) -> None:
    cached = 10**a * problem.left, 10**b * problem.right
    bound = theory.cached_efficiency_bound(problem.left, problem.right, *cached)
    assert float(bound) == pytest.approx(1, rel=roundoff(problem.map_condition))


@repeatable
@given(factors(4, exponent=2.0), factors(4, exponent=2.0), factors(3, exponent=2.0))
def test_distortion_is_its_definition(P: Factor, cached: Factor, other: Factor) -> None:
    fixed = other.power(1)
    drift = condition(P.power(-1) @ cached.power(1))
    slack = roundoff(P.condition * cached.condition)
    for got in (
        theory.cached_efficiency_bound(P.power(1), fixed, cached.power(1), fixed),
        theory.cached_efficiency_bound(fixed, P.power(1), fixed, cached.power(1)),
    ):
        assert float(got) == pytest.approx(1 / drift, rel=slack)


def distributions(seed: int, c: int) -> tuple[Tensor, Tensor]:
    """Two laws over c labels, some sharp and some flat."""
    logits = 3 * normal(2, c, random_source(seed))
    q, p = logits.softmax(-1)
    return q, p


def label_moment(weights: Tensor, p: Tensor) -> Tensor:
    """E_{y∼weights}[(p − e_y)(p − e_y)ᵀ], summed label by label."""
    total = torch.zeros(len(p), len(p), dtype=torch.float64)
    for y, weight in enumerate(weights):
        delta = p.clone()
        delta[y] -= 1
        total += weight * torch.outer(delta, delta)
    return total


@repeatable
@given(seeds, st.integers(1, 8))
def test_the_factor_mismatch_is_the_difference_of_expectations(seed: int, c: int) -> None:
    q, p = distributions(seed, c)
    fisher, observed = label_moment(p, p), label_moment(q, p)
    mismatch = theory.observed_label_mismatch(q, p)
    assert torch.allclose(theory.softmax_fisher(p), fisher, rtol=0, atol=roundoff())
    assert torch.allclose(mismatch, observed - fisher, rtol=0, atol=roundoff())
    bound = float(theory.observed_label_mismatch_bound(q, p))
    assert bound == pytest.approx(3 * math.dist(q.tolist(), p.tolist()), rel=roundoff())
    assert operator(mismatch) <= bound + roundoff()


@repeatable
@given(seeds, st.integers(1, 8))
def test_the_observed_factor_is_the_expectation_over_its_labels(seed: int, c: int) -> None:
    q, p = distributions(seed, c)
    found = theory.observed_label_factor(q, p)
    assert torch.allclose(found, label_moment(q, p), rtol=0, atol=roundoff())
    same = theory.observed_label_factor(p, p)
    assert torch.allclose(same, theory.softmax_fisher(p), rtol=0, atol=roundoff())


@repeatable
@given(seeds, st.integers(2, 6), st.integers(1, 7))
def test_an_estimated_factor_is_within_sampling_and_mismatch(seed: int, c: int, h: int) -> None:
    """Corollary 4's two terms, for an estimate from some labels."""
    q, p = distributions(seed, c)
    labels, _ = distributions(seed + 2, c)
    J = normal(c, h, random_source(seed + 1))
    estimated = J.T @ label_moment(labels, p) @ J
    bound = float(theory.observed_factor_error_bound(estimated, q, p, J))
    error = operator(estimated - J.T @ label_moment(p, p) @ J)
    slack = roundoff(operator(J) ** 2)
    assert error <= bound + slack
    sampling = operator(estimated - J.T @ label_moment(q, p) @ J)
    mismatch = float(theory.observed_label_mismatch_bound(q, p, J))
    assert bound == pytest.approx(sampling + mismatch, abs=slack)
    # Without noise and mismatch nothing is left.
    assert float(theory.observed_factor_error_bound(label_moment(p, p), p, p)) <= roundoff()


@repeatable
@given(seeds, st.integers(1, 5))
def test_the_factor_error_is_within_its_four_parts(seed: int, d: int) -> None:
    source = random_source(seed)
    cached, current, estimated, observed, fisher = (
        X + X.T for X in (normal(d, d, source) for _ in range(5))
    )
    terms = theory.factor_error_terms(cached, current, estimated, observed, fisher)
    apart = [estimated - observed, observed - fisher, current - estimated, cached - current]
    assert terms.tolist() == pytest.approx([operator(X) for X in apart], rel=roundoff())
    assert operator(cached - fisher) <= float(terms.sum()) * (1 + roundoff())
    # Errors in one direction add up, so no constant could be better.
    steps = [k * estimated for k in (1.0, 2.0, 4.0, 8.0, 16.0)]
    aligned = theory.factor_error_terms(steps[0], steps[1], steps[2], steps[3], steps[4])
    assert float(aligned.sum()) == pytest.approx(operator(steps[0] - steps[4]), rel=roundoff())


def test_factor_error_terms_are_batched_and_broadcast() -> None:
    source = random_source(0)
    batch = torch.stack([normal(3, 3, source) for _ in range(4)])
    terms = theory.factor_error_terms(batch, batch[0], batch[1], batch[2], batch[3])
    assert terms.shape == (4, 4)
    assert terms[0, 3] == 0
    assert torch.equal(terms[:, 0], terms[:1, 0].expand(4))


@repeatable
@given(seeds, st.integers(2, 6), st.integers(1, 7))
def test_a_hidden_layer_multiplies_the_bound_by_its_jacobian(seed: int, c: int, h: int) -> None:
    q, p = distributions(seed, c)
    J = normal(c, h, random_source(seed + 1))
    hidden = J.T @ (label_moment(q, p) - label_moment(p, p)) @ J
    bound = float(theory.observed_label_mismatch_bound(q, p, J))
    assert operator(hidden) <= bound + roundoff(operator(J) ** 2)
    plain = float(theory.observed_label_mismatch_bound(q, p))
    assert bound == pytest.approx(plain * operator(J) ** 2, rel=roundoff())


def test_softmax_quantities_are_batched() -> None:
    pairs = [distributions(seed, 5) for seed in range(3)]
    q, p = (torch.stack(side) for side in zip(*pairs, strict=True))
    for i in range(3):
        assert torch.equal(theory.softmax_fisher(p)[i], theory.softmax_fisher(p[i]))
        alone = theory.observed_label_mismatch(q[i], p[i])
        assert torch.equal(theory.observed_label_mismatch(q, p)[i], alone)
    assert theory.observed_label_mismatch_bound(q, p).shape == (3,)


def test_the_papers_numbers() -> None:
    assert f"{theory.sparse_variance_ratio(0.97, 4):.5f}" == "3.99537"
    assert f"{theory.sparse_lag(0.97, 4):.4f}" == "32.3714"
    assert f"{theory.sparse_lag(0.97, 1):.4f}" == "32.3333"


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9, 0.97])
@pytest.mark.parametrize("every", [1, 2, 4, 7])
def test_sparse_averages_from_the_weights_of_the_recursion(beta: float, every: int) -> None:
    def weights(decay: float) -> list[float]:
        # Unrolled: the observation j refreshes ago has weight (1−decay)·decay^j.
        return [(1 - decay) * decay**j for j in range(2000)]

    sparse, dense = weights(beta**every), weights(beta)
    variance = math.fsum(w * w for w in sparse)
    assert theory.ema_variance(beta, every) == pytest.approx(variance, rel=1e-12)
    ratio = variance / math.fsum(w * w for w in dense)
    assert theory.sparse_variance_ratio(beta, every) == pytest.approx(ratio, rel=1e-12)
    # At phase s of the block the observation made j refreshes ago is jK + s steps old.
    ages = [
        math.fsum(w * (j * every + phase) for j, w in enumerate(sparse)) for phase in range(every)
    ]
    assert theory.sparse_lag(beta, every) == pytest.approx(math.fsum(ages) / every, rel=1e-12)


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("every", [1, 2, 4])
def test_the_covariance_of_an_average_from_the_weights_of_the_recursion(
    beta: float, every: int
) -> None:
    """Σ_{ij} w_i w_j Γ_{(j−i)K}, for a moving average of white noise in two dimensions."""
    source = random_source(5)
    theta = [normal(2, 2, source) for _ in range(6)]
    gamma = torch.stack(
        [sum(a @ b.T for a, b in zip(theta[lag:], theta, strict=False)) for lag in range(6)]  # type: ignore[misc]
    )
    decay = beta**every
    weights = [(1 - decay) * decay**j for j in range(400)]
    total = torch.zeros(2, 2, dtype=torch.float64)
    for i, w in enumerate(weights):
        for j in range(max(0, i - 5), min(len(weights), i + 6)):
            lag = (j - i) * every
            if abs(lag) < 6:
                # Y sums w_i X_{t−iK}, and Cov(X_{t−iK}, X_{t−jK}) = Γ_{(j−i)K}.
                total += w * weights[j] * (gamma[lag] if lag >= 0 else gamma[-lag].T)
    found = theory.ema_covariance(gamma, beta, every)
    assert torch.allclose(found, total, rtol=0, atol=1e-10 * float(gamma[0].norm()))
    assert torch.equal(found, found.mT)


def test_the_covariance_of_white_noise_is_the_variance() -> None:
    white = torch.eye(3, dtype=torch.float64).expand(2, 1, 3, 3)
    found = theory.ema_covariance(white, 0.97, 4)
    assert torch.equal(found, theory.ema_variance(0.97, 4) * white[:, 0])


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.97])
@pytest.mark.parametrize("every", [1, 2, 4, 7])
def test_the_noise_gain_is_the_ratio_of_the_transfer_functions(beta: float, every: int) -> None:
    def transfer(decay: float, angle: float) -> float:
        return abs((1 - decay) / (1 - decay * cmath.exp(-1j * angle))) ** 2

    for frequency in (0.0, 0.01, 1.0, -2.0, math.tau / every, math.pi, 50.0):
        ratio = transfer(beta**every, every * frequency) / transfer(beta, frequency)
        gain = theory.sparse_noise_gain(beta, every, frequency)
        assert gain == pytest.approx(ratio, rel=1e-10)
        assert gain >= 1 - 1e-12
    assert theory.sparse_noise_gain(beta, every, 0.0) == 1


@pytest.mark.parametrize("correlation", [-0.8, 0.0, 0.9])
def test_sparse_averages_of_correlated_noise_vary_more(correlation: float) -> None:
    """Noise with autocovariance ρ^|k|, by the recursion's weights and by its spectrum."""
    beta, every, points = 0.9, 4, 2048

    def variance(step: int) -> float:
        ages = torch.arange(400, dtype=torch.float64)
        weights = (1 - beta**step) * beta ** (step * ages)
        apart = step * (ages[:, None] - ages).abs()
        signs = torch.where(apart % 2 == 1, math.copysign(1.0, correlation), 1.0)
        return float(weights @ (signs * abs(correlation) ** apart) @ weights)

    def spectral(gain: Callable[[float], float]) -> float:
        total = 0.0
        for point in range(points):
            omega = math.tau * point / points
            density = (1 - correlation**2) / abs(1 - correlation * cmath.exp(-1j * omega)) ** 2
            dense = abs((1 - beta) / (1 - beta * cmath.exp(-1j * omega))) ** 2
            total += density * dense * gain(omega)
        return total / points

    assert variance(every) > variance(1)
    assert spectral(lambda omega: 1.0) == pytest.approx(variance(1), rel=1e-10)
    sparse = spectral(lambda omega: theory.sparse_noise_gain(beta, every, omega))
    assert sparse == pytest.approx(variance(every), rel=1e-10)
