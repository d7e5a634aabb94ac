"""The matched direction without fourth roots: a geometric mean of the squared maps.

With T = P_B², S = P_A² and C̃ = T M S, the direction of Equation (4) is C̃(MᵀC̃)^(−1/2), for a
source with full column rank. It needs no inverse fourth roots and no map back, but two matrices
are iterated instead of one, and no product is symmetric. That is slower, so the step does not use
it; these tests hold that it is the same direction.
"""

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gomuon.functional import matched_direction, polar_express
from tests.functional.matrices import (
    distance,
    normal,
    orthogonal,
    random_source,
    repeatable,
    seeds,
)


def inverse_square_root(X: Tensor) -> Tensor:
    """X^(−1/2) of a matrix that is similar to a positive definite one, by eigenvectors."""
    values, V = torch.linalg.eig(X)
    return ((V * values.rsqrt()) @ torch.linalg.inv(V)).real


def geometric_mean(X: Tensor, Y: Tensor) -> Tensor:
    """X # Y = X(X⁻¹Y)^(1/2), for positive definite X and Y."""
    return X @ inverse_square_root(torch.linalg.solve(Y, X))


def coupled(M: Tensor, T: Tensor, S: Tensor, steps: int) -> Tensor:
    """The same by products alone: X tends to the direction, Y to P_B⁻¹·polar(C)·P_A⁻¹."""
    X = T @ M @ S
    length = (M * X).sum().sqrt()
    X, Y = X / length, M / length
    for a, b, c in itertools.islice(polar_express._quintics(), steps):
        N = Y.T @ X
        p = b * N + c * N @ N
        X, Y = a * X + X @ p, a * Y + Y @ p.T
    return X


def well_conditioned(seed: int, m: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """A source with singular values in [.1, 1], and maps with eigenvalues in [.5, 2]."""
    source = random_source(seed)

    def matrix(rows: int, columns: int, low: float, high: float) -> Tensor:
        k = min(rows, columns)
        U, V = orthogonal(rows, source)[:, :k], orthogonal(columns, source)[:, :k]
        values = torch.linspace(low, high, k, dtype=torch.float64)
        return (U * values) @ (U if rows == columns and low == 0.5 else V).T

    return matrix(m, n, 0.1, 1.0), matrix(m, m, 0.5, 2.0), matrix(n, n, 0.5, 2.0)


def test_it_is_the_matched_direction() -> None:
    for seed, (m, n) in enumerate([(1, 1), (4, 4), (7, 3), (12, 5), (9, 9)]):
        M, left, right = well_conditioned(seed, m, n)
        wanted = matched_direction(M, left, right)
        T, S = left @ left, right @ right
        mixed = T @ M @ S
        assert distance(mixed @ inverse_square_root(M.T @ mixed), wanted) <= 1e-9


def test_it_is_a_geometric_mean() -> None:
    """D = (T # (M S Mᵀ)⁻¹) M S, for a square source."""
    for seed in range(5):
        M, left, right = well_conditioned(seed, 6, 6)
        T, S = left @ left, right @ right
        mean = geometric_mean(T, torch.linalg.inv(M @ S @ M.T))
        assert distance(mean @ M @ S, matched_direction(M, left, right)) <= 1e-9


@repeatable
@given(seeds, st.integers(1, 9), st.integers(0, 5))
def test_products_alone_converge_to_it(seed: int, columns: int, more: int) -> None:
    M, left, right = well_conditioned(seed, columns + more, columns)
    found = coupled(M, left @ left, right @ right, steps=20)
    assert distance(found, matched_direction(M, left, right)) <= 1e-10


def test_six_steps_are_as_near_as_six_of_the_usual_form() -> None:
    source = random_source(3)
    M, left, right = normal(40, 24, source), torch.eye(40).double(), torch.eye(24).double()
    assert distance(coupled(M, left, right, steps=6), matched_direction(M, left, right)) <= 0.01
