"""Section 3.4: what observing a factor only every K steps does to its variance and its lag."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from gomuon.functional import theory
from gomuon.lab.verification.adversary import Case
from gomuon.lab.verification.statement import Statement, always, equal
from gomuon.lab.verification.unknowns import Between, Fixed, Numbers, Whole

BETA, EVERY = 0.97, 4  # the paper's
DECAYS = Between(0.0, 0.99)
INTERVALS = Whole(16)
CLOCKS = ((BETA, EVERY), (0.8, 2), (0.5, 3))
NOISES = ((16, 1), (9, 3))  # lags and width of a moving average of white noise
UNROLLED = 4000  # observations; .99 to this power is below rounding


def covariance_dominance(beta: float, every: int, weights: Tensor) -> Tensor:
    """1 − λ_max(Cov(Y)⁻¹Cov(Z)) for noise X_t = Σ_j Θ_j ε_{t−j}: no direction varies less in Y."""
    lags = weights.shape[1]
    shifted = [
        torch.einsum("bjik,bjlk->bil", weights[:, lag:], weights[:, : lags - lag])
        for lag in range(lags)
    ]
    autocovariances = torch.stack(shifted, 1)  # Γ_j = Σ_i Θ_{i+j} Θ_iᵀ
    sparse = theory.ema_covariance(autocovariances, beta, every)
    dense = theory.ema_covariance(autocovariances, beta)
    # A direction without any noise says nothing; the ridge keeps rounding from deciding there.
    ridge = 1e-6 * sparse.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None]
    ridge = ridge * torch.eye(sparse.shape[-1], dtype=sparse.dtype, device=sparse.device)
    L = torch.linalg.cholesky(sparse + ridge)
    whitened = torch.linalg.solve_triangular(L, dense + ridge, upper=False)
    whitened = torch.linalg.solve_triangular(L, whitened.mT, upper=False)
    return 1 - torch.linalg.eigvalsh(whitened)[:, -1]


def noise_gain(beta: Tensor, every: Tensor, frequency: Tensor) -> Tensor:
    """1 − 1/gain: no frequency passes the sparse average weaker than the per-step one."""
    return 1 - 1 / _each(theory.sparse_noise_gain, beta, every, frequency)


def iid_variance(beta: Tensor, every: Tensor) -> Tensor:
    """The sum of the squared weights that unrolling the recursion gives its observations."""
    variance = _weights(beta, every).square().sum(-1)
    found = _each(theory.ema_variance, beta, every)
    return equal(found, variance, variance)


def lag(beta: Tensor, every: Tensor) -> Tensor:
    """The weighted age of the observations: j·K at a refresh, and (K − 1)/2 more on average."""
    ages = torch.arange(UNROLLED, dtype=beta.dtype, device=beta.device) * every[:, None]
    mean = (_weights(beta, every) * ages).sum(-1) + (every - 1) / 2
    return equal(_each(theory.sparse_lag, beta, every), mean, mean + 1)


def _weights(beta: Tensor, every: Tensor) -> Tensor:
    """(1 − β^K)·β^(jK), the weight of the observation that is j refreshes old, [b, j]."""
    decay = beta.pow(every)[:, None]
    return (1 - decay) * decay.pow(torch.arange(UNROLLED, dtype=beta.dtype, device=beta.device))


def _each(function: Callable[..., float], beta: Tensor, every: Tensor, *more: Tensor) -> Tensor:
    """A function of plain numbers, one instance after another."""
    numbers = zip(beta.tolist(), map(int, every.tolist()), *(x.tolist() for x in more), strict=True)
    return beta.new_tensor([function(*given) for given in numbers])


def printed(value: Callable[[], float], number: str, point: Tensor) -> Tensor:
    """The value rounds to the printed number."""
    half = 0.5 * 10.0 ** -len(number.partition(".")[2])
    return point.new_tensor([1 - abs(value() - float(number)) / half])


def _printed(value: Callable[[], float], number: str) -> Case:
    return Case((Fixed(),), partial(printed, value, number))


AVERAGE = (
    Statement(
        "covariance dominance",
        "Eq. (23)",
        "Cov(vec Y) ⪰ Cov(vec Z) for stationary noise, here moving averages of white noise",
        always(
            *(
                Case((Numbers((lags, d, d)),), partial(covariance_dominance, *clock))
                for clock in CLOCKS
                for lags, d in NOISES
            )
        ),
    ),
    Statement(
        "dominance at every frequency",
        "Prop. 6",
        "|G_K(ω)|² ≥ |H_1(ω)|²",
        always(Case((DECAYS, INTERVALS, Between(-3.2, 3.2)), noise_gain)),
    ),
    Statement(
        "variance for IID",
        "Eq. (24)",
        "Cov(vec Y) = (1 − β^K)/(1 + β^K)·Σ, at K = 1 Cov(vec Z)",
        always(Case((DECAYS, INTERVALS), iid_variance)),
    ),
    Statement(
        "lag on an affine signal",
        "Eq. (26)",
        "L_K = Kβ^K/(1 − β^K) + (K − 1)/2",
        always(Case((DECAYS, INTERVALS), lag)),
    ),
    Statement(
        "variance ratio 3.99537",
        "Sec. 3.4",
        "at β = .97 and K = 4 the ratio of the variances rounds to 3.99537",
        always(_printed(lambda: theory.sparse_variance_ratio(BETA, EVERY), "3.99537")),
        allowed=0.0,
    ),
    Statement(
        "lag 32.3714",
        "Sec. 3.4",
        "L_4 at β = .97 rounds to 32.3714",
        always(_printed(lambda: theory.sparse_lag(BETA, EVERY), "32.3714")),
        allowed=0.0,
    ),
    Statement(
        "lag 32.3333",
        "Sec. 3.4",
        "L_1 at β = .97 rounds to 32.3333",
        always(_printed(lambda: theory.sparse_lag(BETA, 1), "32.3333")),
        allowed=0.0,
    ),
)
