"""Gram–Schmidt and orthogonal iteration: orthonormal for every matrix, without a wait."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from gomuon.functional.orthonormal import (
    FIRST_STEPS,
    PANEL,
    eigenbasis,
    eigenbasis_products,
    gram_schmidt_products,
    orthonormalised,
)
from gomuon.lab.costs.recorder import OperationRecorder
from tests.functional.matrices import distance, normal, orthogonal, random_source, spectrum

DTYPES = [(torch.float32, 1e-5), (torch.float64, 1e-13)]
SIDES = [1, 2, 7, PANEL, PANEL + 1, 2 * PANEL + 6]


def fault(Q: Tensor) -> float:
    """The largest entry of QᵀQ − I."""
    Q = Q.double()
    return float((Q.mT @ Q - torch.eye(Q.shape[-1], dtype=Q.dtype)).abs().max())


def conditioned(d: int, ratio: float, seed: int = 0) -> Tensor:
    """A matrix with this condition number."""
    source = random_source(seed)
    U, V = orthogonal(d, source), orthogonal(d, source)
    return (U * spectrum(d, ratio, source)) @ V


def positive(values: Tensor, seed: int = 0) -> Tensor:
    """A symmetric matrix with these eigenvalues."""
    V = orthogonal(len(values), random_source(seed))
    return (V * values) @ V.mT


# ---- Gram–Schmidt --------------------------------------------------------------------------------


@pytest.mark.parametrize("d", SIDES)
@pytest.mark.parametrize(("dtype", "bound"), DTYPES)
def test_the_columns_are_those_of_qr_up_to_signs(d: int, dtype: torch.dtype, bound: float) -> None:
    X = torch.stack([conditioned(d, 10.0, seed) for seed in range(6)]).to(dtype).view(2, 3, d, d)
    before = X.clone()
    Q, (exact, R) = orthonormalised(X), torch.linalg.qr(X)
    signs = R.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    assert float((Q - exact * signs).abs().max()) < bound
    assert Q.dtype == dtype
    assert torch.equal(X, before)


@pytest.mark.parametrize(("d", "k"), [(5, 1), (7, 3), (PANEL + 9, PANEL + 2), (3 * PANEL, PANEL)])
@pytest.mark.parametrize(("dtype", "bound"), DTYPES)
def test_fewer_columns_than_rows(d: int, k: int, dtype: torch.dtype, bound: float) -> None:
    X = torch.stack([normal(d, k, random_source(seed)) for seed in range(3)]).to(dtype)
    with OperationRecorder() as record:
        Q = orthonormalised(X)
    assert record.product_flops == 3 * sum(2 * m * i * n for m, i, n in gram_schmidt_products(d, k))
    exact, R = torch.linalg.qr(X)
    signs = R.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    assert float((Q - exact * signs).abs().max()) < bound
    dependent = X[..., :1].expand(-1, -1, k)
    assert fault(orthonormalised(dependent)) < 10 * bound


@pytest.mark.parametrize("d", SIDES)
@pytest.mark.parametrize("ratio", [1e3, 1e6, 1e9])
@pytest.mark.parametrize(("dtype", "bound"), DTYPES)
def test_ill_conditioned(d: int, ratio: float, dtype: torch.dtype, bound: float) -> None:
    X = torch.stack([conditioned(d, ratio, seed) for seed in range(20)]).to(dtype)
    assert fault(orthonormalised(X)) < bound


def singular(d: int, source: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    for rank in {0, 1, d // 2}:
        yield f"rank {rank}", normal(d, rank, source) @ normal(rank, d, source)
    X = normal(d, d, source)
    X[:, d // 2 :] = X[:, : d - d // 2].clone()
    yield "columns twice", X
    X = torch.zeros(d, d, dtype=torch.float64)
    X[: d // 2, : d // 2] = normal(d // 2, d // 2, source)
    yield "dead rows and columns", X
    yield "all columns equal", torch.ones(d, d, dtype=torch.float64)
    # Each column is only a little apart from the one before: singular, but no column vanishes.
    X = 1e-3 * (U := orthogonal(d, source))
    X[:, 1:] += U[:, :-1]
    yield "chain", X
    levels = 10 ** (-8 * torch.rand(1, d, generator=source, dtype=torch.float64))
    yield "apart at all levels", normal(d, 1, source) + normal(d, d, source) * levels


@pytest.mark.parametrize("d", SIDES)
@pytest.mark.parametrize(("dtype", "bound"), DTYPES)
def test_singular(d: int, dtype: torch.dtype, bound: float) -> None:
    for seed in range(10):
        for name, X in singular(d, random_source(seed)):
            assert fault(orthonormalised(X.to(dtype))) < bound, name


@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1e30, 1e37])
def test_the_scale_of_columns_does_not_matter(scale: float) -> None:
    X = conditioned(40, 10.0).float()
    scaled = X.clone()
    scaled[:, ::2] *= scale
    torch.testing.assert_close(orthonormalised(scaled), orthonormalised(X), rtol=0, atol=1e-5)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("column", [0, 39])
def test_what_is_not_finite_stays_visible_and_alone(value: float, column: int) -> None:
    X = conditioned(40, 10.0).float().repeat(3, 1, 1)
    exact = orthonormalised(X)
    X[1, 0, column] = value
    Q = orthonormalised(X)
    assert torch.equal(Q[0], exact[0])
    assert torch.equal(Q[2], exact[2])
    assert not bool(Q[1].isfinite().all())


@pytest.mark.parametrize("make", [orthonormalised, lambda X: eigenbasis(X @ X.mT, 2)[1]])
def test_only_products_and_no_wait(make: Callable[[Tensor], Tensor]) -> None:
    X = torch.randn(2, 70, 70, generator=random_source(0))
    with OperationRecorder() as record:
        make(X)
    assert not record.decompositions
    assert not [x for x in record.operations if x.waits or x.is_float64]


@pytest.mark.parametrize("d", [3, 32, 70])
def test_the_products_are_counted(d: int) -> None:
    S = torch.stack([positive(spectrum(d, 10.0, random_source(seed))) for seed in range(2)])

    def flops(shapes: list[tuple[int, int, int]]) -> int:
        return 2 * sum(2 * m * k * n for m, k, n in shapes)  # two matrices

    with OperationRecorder() as record:
        orthonormalised(S)
    assert record.product_flops == flops(gram_schmidt_products(d))
    with OperationRecorder() as record:
        eigenbasis(S, 3)
    assert record.product_flops == flops(eigenbasis_products(d, 3))


# ---- orthogonal iteration ------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "bound"), DTYPES)
def test_separate_eigenvalues_give_eigenvectors(dtype: torch.dtype, bound: float) -> None:
    exact = 4.0 ** -torch.arange(6, dtype=torch.float64)
    S = torch.stack([positive(exact, seed) for seed in range(4)]).to(dtype)
    values, V = eigenbasis(S, 30)
    vectors = torch.linalg.eigh(S)[1].flip(-1)
    assert float((values - exact).abs().max()) < bound
    assert float(((V * vectors).sum(-2).abs() - 1).abs().max()) < bound
    assert fault(V) < bound


def test_a_step_separates_eigenvalues_by_their_ratio() -> None:
    exact = torch.tensor([1.0, 0.5], dtype=torch.float64)
    S, first = positive(exact), torch.linalg.eigh(positive(exact))[1][:, 1]
    tangents = []
    for steps in (4, 5):
        cosine = float((eigenbasis(S, steps)[1][:, 0] @ first).abs())
        tangents.append((1 / cosine**2 - 1) ** 0.5)
    assert tangents[1] / tangents[0] == pytest.approx(0.5)


@pytest.mark.parametrize("decay", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("d", [48, 120])
def test_the_inverse_is_near_after_the_first_steps(decay: float, d: int) -> None:
    """(S + I/10)⁻¹ of S with eigenvalues 1, 2^−decay, 3^−decay, …"""
    S = positive(torch.arange(1, d + 1, dtype=torch.float64) ** -decay)
    values, V = eigenbasis(S.float(), FIRST_STEPS)
    found = ((V / (values + 0.1)) @ V.mT).double()
    exact = torch.linalg.inv(S + 0.1 * torch.eye(d, dtype=torch.float64))
    assert distance(found, exact) < 0.03


def test_values_are_rayleigh_quotients_largest_first() -> None:
    S = positive(spectrum(20, 100.0, random_source(1)))
    values, V = eigenbasis(S, 3)
    torch.testing.assert_close(values, (V.mT @ S @ V).diagonal(), rtol=0, atol=1e-14)
    assert bool((values.diff() <= 0).all())


def test_a_start_is_used() -> None:
    S = positive(spectrum(20, 100.0, random_source(1)))
    exact, vectors = torch.linalg.eigh(S)
    values, V = eigenbasis(S, 1, vectors)  # in the wrong order
    torch.testing.assert_close(values, exact.flip(0), rtol=0, atol=1e-14)
    torch.testing.assert_close((V * vectors.flip(1)).sum(0).abs(), torch.ones_like(values))


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_no_scale_is_too_large_or_too_small(scale: float) -> None:
    S = positive(spectrum(20, 100.0, random_source(1))).float()
    values, V = eigenbasis(scale * S, FIRST_STEPS)
    torch.testing.assert_close(values / scale, eigenbasis(S, FIRST_STEPS)[0], rtol=1e-4, atol=1e-6)
    assert fault(V) < 1e-5


def test_zero_has_a_basis_too() -> None:
    values, V = eigenbasis(torch.zeros(2, 40, 40), FIRST_STEPS)
    assert not values.any()
    assert fault(V) < 1e-5
