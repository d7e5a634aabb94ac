"""Spectra by decomposition and by products agree with float64 definitions."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from gomuon.functional.spectra import (
    eigenvalue_range,
    inverse_and_spectrum,
    largest_eigenvalue,
    nuclear_norm_and_rank,
    operator_norm,
    singular_values,
)
from tests.accelerator import host_as_accelerator

FORMS = ("decomposed", "products")


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> Iterator[str]:
    """Both forms, the second one as on an accelerator."""
    if request.param == "products":
        with host_as_accelerator():
            yield request.param
    else:
        yield request.param


def definite(d: int, condition: float, *, seed: int = 0) -> Tensor:
    """[3, d, d] with eigenvalues evenly spaced on a logarithmic scale."""
    generator = torch.Generator().manual_seed(seed)
    Q = torch.linalg.qr(torch.randn(3, d, d, generator=generator, dtype=torch.float64)).Q
    values = torch.logspace(0, -torch.log10(torch.tensor(condition)).item(), d).double()
    return (Q * values) @ Q.mT


@pytest.mark.parametrize("d", [1, 5, 64])
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_the_largest_eigenvalue_is_never_underestimated(d: int, scale: float) -> None:
    S = definite(d, 100.0) * scale
    found = largest_eigenvalue(S.float()).double()
    exact = torch.linalg.eigvalsh(S)[:, -1]
    assert torch.all(found >= exact * (1 - 1e-5))
    torch.testing.assert_close(found, exact, rtol=1e-3, atol=0.0)


def test_of_zero_and_of_several_equal_eigenvalues() -> None:
    assert float(largest_eigenvalue(torch.zeros(4, 4))) < 1e-30
    assert float(operator_norm(torch.zeros(2, 3))) == 0
    torch.testing.assert_close(
        largest_eigenvalue(torch.eye(300)), torch.tensor(1.0), rtol=1e-3, atol=0.0
    )


@pytest.mark.parametrize("shape", [(3, 8, 20), (3, 20, 8), (1, 7)])
def test_the_operator_norm(shape: tuple[int, ...]) -> None:
    X = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    exact = torch.linalg.matrix_norm(X.double(), ord=2).float()
    torch.testing.assert_close(operator_norm(X), exact, rtol=1e-3, atol=0.0)


@pytest.mark.parametrize("condition", [1.5, 100.0, 1000.0])
def test_range_inverse_and_count(form: str, condition: float) -> None:
    S = definite(24, condition)
    smallest, largest = eigenvalue_range(S.float())
    values = torch.linalg.eigvalsh(S)
    torch.testing.assert_close(smallest.double(), values[:, 0], rtol=3e-3, atol=0.0)
    torch.testing.assert_close(largest.double(), values[:, -1], rtol=3e-3, atol=0.0)
    above = condition**0.5  # half of the eigenvalues
    inverse, low, high, count = inverse_and_spectrum(S.float(), above)
    torch.testing.assert_close(
        inverse.double() @ S, torch.eye(24).double().expand(3, -1, -1), rtol=0.0, atol=1e-3
    )
    torch.testing.assert_close(low, smallest, rtol=3e-3, atol=0.0)
    torch.testing.assert_close(high, largest, rtol=3e-3, atol=0.0)
    assert count.tolist() == [12] * 3


@pytest.mark.parametrize("shape", [(2, 12, 30), (2, 30, 12), (2, 16, 16)])
@pytest.mark.parametrize("rank", [4, 12])
def test_nuclear_norm_and_rank(form: str, shape: tuple[int, ...], rank: int) -> None:
    generator = torch.Generator().manual_seed(2)
    b, m, n = shape
    X = torch.randn(b, m, rank, generator=generator) @ torch.randn(b, rank, n, generator=generator)
    nuclear, found = nuclear_norm_and_rank(X)
    exact = torch.linalg.matrix_norm(X.double(), ord="nuc").float()
    torch.testing.assert_close(nuclear, exact, rtol=1e-4, atol=0.0)
    assert found.tolist() == [rank] * b


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_singular_values_are_those_of_an_svd(dtype: torch.dtype) -> None:
    X = torch.randn(2, 9, 14, generator=torch.Generator().manual_seed(3)).to(dtype)
    found = singular_values(X).sort(descending=True).values
    exact = torch.linalg.svdvals(X.double())
    torch.testing.assert_close(found, exact, rtol=1e-6, atol=0.0)
