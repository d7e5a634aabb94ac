"""Inverse roots from known spectra, their floor, and decompositions that fail."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gomuon.errors import DecompositionError
from gomuon.functional import inverse_root
from gomuon.functional.linalg import decompose
from tests.functional.matrices import (
    ALPHAS,
    EPS,
    Factor,
    distance,
    factors,
    normal,
    random_source,
    repeatable,
    roundoff,
)


@repeatable
@given(factors(), st.sampled_from(ALPHAS))
def test_the_root_of_a_known_spectrum(factor: Factor, power: float) -> None:
    root = inverse_root(factor.power(1), power)
    # Storing S rounds its least eigenvalue by εκ relative to itself, and the root by power times
    # that; an eigenvector turned by ε mixes in at most the same.
    assert distance(root, factor.power(-power)) <= roundoff(factor.condition)
    assert float((root - root.T).abs().max()) <= 8 * EPS * float(root.abs().max())
    assert float(torch.linalg.eigvalsh(root)[0]) > 0


@repeatable
@given(factors(exponent=2.0))
def test_four_quarter_roots_invert(factor: Factor) -> None:
    S, root = factor.power(1), inverse_root(factor.power(1), 1 / 4)
    identity = torch.eye(len(S), dtype=torch.float64)
    product = root @ root @ S @ root @ root
    assert torch.allclose(product, identity, rtol=0, atol=roundoff(factor.condition))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_diagonal_by_hand(dtype: torch.dtype) -> None:
    S = torch.diag(torch.tensor([16.0, 1 / 81, 1.0], dtype=dtype))
    wanted = torch.diag(torch.tensor([0.5, 3.0, 1.0], dtype=dtype))
    root = inverse_root(S, 1 / 4)
    assert root.dtype == dtype
    assert torch.allclose(root, wanted, rtol=0, atol=20 * torch.finfo(dtype).eps)


def test_a_power_beyond_one_half_is_a_power_too() -> None:
    S = torch.diag(torch.tensor([4.0, 0.5], dtype=torch.float64))
    assert torch.allclose(inverse_root(S, 1), torch.diag(1 / S.diagonal()), rtol=1e-15, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("least", [0.0, -1e-20, 1e-30])
@pytest.mark.parametrize("scale", [1.0, 1e-6])
def test_eigenvalues_are_floored_at_roundoff_scale(
    scale: float, least: float, dtype: torch.dtype
) -> None:
    S = scale * torch.diag(torch.tensor([1.0, 0.5, least], dtype=dtype))
    floor = 3 * torch.finfo(dtype).eps  # d·ε of the largest
    wanted = torch.tensor([1.0, 0.5, floor], dtype=dtype).mul(scale).pow(-1 / 4)
    root = inverse_root(S, 1 / 4)
    assert torch.allclose(root.diagonal(), wanted, rtol=1e-5, atol=0)


def test_the_floor_leaves_what_is_above_it() -> None:
    S = torch.diag(torch.tensor([1.0, 1e-14], dtype=torch.float64))
    assert float(inverse_root(S, 1 / 2)[1, 1]) == pytest.approx(1e7, rel=1e-12)


@pytest.mark.parametrize("power", ALPHAS)
def test_the_zero_matrix_gives_the_identity(power: float) -> None:
    assert torch.equal(inverse_root(torch.zeros(3, 3), power), torch.eye(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_batch_is_its_loop(dtype: torch.dtype) -> None:
    X = normal(20, 4, random_source(0)).view(5, 4, 4).to(dtype)
    S = X @ X.mT + torch.eye(4, dtype=dtype)
    S[2] = 0
    roots = inverse_root(S, 1 / 4)
    assert torch.equal(roots[2], torch.eye(4, dtype=dtype))
    for alone, together in zip(S, roots, strict=True):
        atol = 20 * torch.finfo(dtype).eps
        assert torch.allclose(together, inverse_root(alone, 1 / 4), rtol=0, atol=atol)


@pytest.mark.parametrize("shape", [(2, 3), (3,), (4, 3, 2)])
def test_anything_but_square_matrices_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="square"):
        inverse_root(torch.ones(shape), 1 / 4)


@pytest.mark.parametrize("power", [-0.25, float("nan")])
def test_a_negative_power_is_refused(power: float) -> None:
    with pytest.raises(ValueError, match="power >= 0"):
        inverse_root(torch.eye(2), power)


def failing_eigh(monkeypatch: pytest.MonkeyPatch, *dtypes: torch.dtype) -> list[torch.dtype]:
    """Make eigh fail in these precisions; the list fills with those it was called in."""
    real, calls = torch.linalg.eigh, list[torch.dtype]()

    def eigh(S: Tensor) -> Any:
        calls.append(S.dtype)
        if S.dtype in dtypes:
            raise torch.linalg.LinAlgError(f"{S.dtype} did not converge")
        return real(S)

    monkeypatch.setattr(torch.linalg, "eigh", eigh)
    return calls


def test_a_failure_is_retried_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = failing_eigh(monkeypatch, torch.float32)
    root = inverse_root(torch.diag(torch.tensor([16.0, 1.0])), 1 / 4)
    assert calls == [torch.float32, torch.float64]
    assert root.dtype == torch.float32
    assert torch.allclose(root, torch.diag(torch.tensor([0.5, 1.0])), rtol=0, atol=1e-6)


def test_no_second_attempt_is_made_without_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = failing_eigh(monkeypatch)
    inverse_root(torch.eye(2), 1 / 4)
    assert calls == [torch.float32]


def test_a_second_failure_is_ours_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    failing_eigh(monkeypatch, torch.float32, torch.float64)
    reason = r"\(2, 2\) torch.float32.*torch.float64 did not converge"
    with pytest.raises(DecompositionError, match=reason):
        inverse_root(torch.eye(2), 1 / 4)


def test_other_errors_pass_through_at_once() -> None:
    calls = list[torch.dtype]()

    def broken(X: Tensor) -> tuple[Tensor]:
        calls.append(X.dtype)
        raise MemoryError

    with pytest.raises(MemoryError):
        decompose(broken, torch.eye(2))
    assert calls == [torch.float32]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("d", [1, 2, 3, 40])
@pytest.mark.parametrize("everywhere", [False, True])
def test_a_non_finite_matrix_is_named_as_the_reason(everywhere: bool, d: int, value: float) -> None:
    # Some LAPACK builds answer NaN with NaN, or infinity with the identity, and no error.
    S = torch.full((d, d), value) if everywhere else torch.eye(d)
    S[-1, -1] = value
    with pytest.raises(DecompositionError, match="NaN or infinity"):
        inverse_root(S, 1 / 4)


def test_one_non_finite_matrix_fails_its_batch() -> None:
    S = torch.eye(3).repeat(4, 1, 1)
    S[2, 0, 0] = float("nan")
    with pytest.raises(DecompositionError, match="NaN or infinity"):
        inverse_root(S, 1 / 4)


def test_half_precision_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"needs float32 or float64, got torch\.bfloat16"):
        inverse_root(torch.eye(3, dtype=torch.bfloat16), 0.25)
