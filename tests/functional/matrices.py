"""Matrices of known spectra for hypothesis to draw: each tolerance follows from what was drawn."""

import math
from dataclasses import dataclass

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

EPS = torch.finfo(torch.float64).eps
LARGEST_CONDITION = 1e8
ALPHAS = (0.0, 1 / 8, 1 / 4, 1 / 2)

# The same examples in every run, and no deadline: a loaded machine is not a failure.
repeatable = settings(max_examples=100, deadline=None, derandomize=True)


def roundoff(*conditions: float) -> float:
    """Forward error of a few products of matrices no larger than 7: 100ε, times conditioning."""
    return 100 * EPS * math.prod(conditions)


def inner(X: Tensor, Y: Tensor) -> float:
    """⟨X, Y⟩ = tr(XᵀY)."""
    return float((X * Y).sum())


def nuclear(X: Tensor) -> float:
    """‖X‖_*."""
    return float(torch.linalg.svdvals(X).sum())


def operator(X: Tensor) -> float:
    """‖X‖_op."""
    return float(torch.linalg.svdvals(X)[0])


def condition(X: Tensor) -> float:
    """σ₁/σ_k, k the smaller side."""
    sigma = torch.linalg.svdvals(X)
    return float(sigma[0] / sigma[-1])


def distance(X: Tensor, Y: Tensor) -> float:
    """‖X − Y‖_F/‖Y‖_F."""
    return float((X - Y).norm() / Y.norm())


def random_source(seed: int) -> torch.Generator:
    """Normal numbers that depend on the seed alone."""
    return torch.Generator().manual_seed(seed)


def normal(m: int, n: int, source: torch.Generator) -> Tensor:
    """An m×n matrix of standard normal numbers."""
    return torch.randn(m, n, generator=source, dtype=torch.float64)


def orthogonal(d: int, source: torch.Generator) -> Tensor:
    """A random orthogonal matrix."""
    return torch.linalg.qr(normal(d, d, source)).Q


def spectrum(k: int, largest_ratio: float, source: torch.Generator) -> Tensor:
    """K values from 1 down to 1/ratio, both ends held, the rest log-uniform between them."""
    exponents = torch.rand(k, generator=source, dtype=torch.float64)
    exponents[-1:] = 1
    exponents[:1] = 0
    return largest_ratio**-exponents


@dataclass(frozen=True)
class Factor:
    """A symmetric positive-definite matrix by its eigenvectors and eigenvalues."""

    basis: Tensor
    eigenvalues: Tensor

    def power(self, exponent: float) -> Tensor:
        """V·diag(eigenvaluesᵉ)·Vᵀ, from the drawn spectrum and no decomposition."""
        X = (self.basis * self.eigenvalues**exponent) @ self.basis.T
        return (X + X.T) / 2

    @property
    def condition(self) -> float:
        """κ₂, as drawn."""
        return float(self.eigenvalues.max() / self.eigenvalues.min())


@dataclass(frozen=True)
class Problem:
    """A source M, the factors A and B, and the power α of the maps."""

    M: Tensor
    A: Factor
    B: Factor
    alpha: float

    @property
    def left(self) -> Tensor:
        """P_B = B^(−α)."""
        return self.B.power(-self.alpha)

    @property
    def right(self) -> Tensor:
        """P_A = A^(−α)."""
        return self.A.power(-self.alpha)

    @property
    def C(self) -> Tensor:
        """P_B M P_A."""
        return self.left @ self.M @ self.right

    @property
    def factor_condition(self) -> float:
        """K_AB."""
        return self.A.condition * self.B.condition

    @property
    def map_condition(self) -> float:
        """κ₂(P_B)·κ₂(P_A), by which relative errors grow through the maps."""
        return self.factor_condition**self.alpha


seeds = st.integers(0, 2**31)
exponents = st.floats(0, math.log10(LARGEST_CONDITION))
# Wide, tall and square, and each degenerate shape by name so that none depends on luck.
shapes = st.one_of(
    st.tuples(st.integers(1, 7), st.integers(1, 7)),
    st.sampled_from([(1, 1), (1, 5), (5, 1), (2, 6), (6, 2), (4, 4)]),
)


@st.composite
def matrices(
    draw: st.DrawFn,
    shape: tuple[int, int] | None = None,
    *,
    min_rank: int = 0,
    full_rank: bool = False,
    exponent: float | None = None,
) -> Tensor:
    """U·diag(s)·Vᵀ with condition 10^exponent on its range; below full rank s ends in zeros."""
    m, n = shape or draw(shapes)
    k = min(m, n)
    rank = k if full_rank else draw(st.integers(min_rank, k))
    source = random_source(draw(seeds))
    ratio = 10 ** (draw(exponents) if exponent is None else exponent)
    sigma = torch.zeros(k, dtype=torch.float64)
    sigma[:rank] = spectrum(rank, ratio, source)
    scale = 10 ** draw(st.floats(-3, 3))
    return scale * (orthogonal(m, source)[:, :k] * sigma) @ orthogonal(n, source)[:, :k].T


@st.composite
def factors(draw: st.DrawFn, d: int | None = None, *, exponent: float | None = None) -> Factor:
    """Symmetric positive definite, with condition 10^exponent and any scale."""
    d = draw(st.integers(1, 7)) if d is None else d
    source = random_source(draw(seeds))
    ratio = 10 ** (draw(exponents) if exponent is None else exponent)
    scale = 10 ** draw(st.floats(-3, 3))
    return Factor(orthogonal(d, source), scale * spectrum(d, ratio, source))


@st.composite
def problems(
    draw: st.DrawFn, *, min_rank: int = 0, full_rank: bool = False, share: bool = False
) -> Problem:
    """A source with its factors; with `share` the three conditions multiply to at most 1e8."""
    shape = draw(shapes)
    parts: list[float | None] = [None, None, None]
    if share:
        cuts = sorted([draw(st.floats(0, 1)), draw(st.floats(0, 1))])
        total = draw(exponents)
        parts = [total * cuts[0], total * (cuts[1] - cuts[0]), total * (1 - cuts[1])]
    return Problem(
        M=draw(matrices(shape, min_rank=min_rank, full_rank=full_rank, exponent=parts[0])),
        A=draw(factors(shape[1], exponent=parts[1])),
        B=draw(factors(shape[0], exponent=parts[2])),
        alpha=draw(st.sampled_from(ALPHAS)),
    )
