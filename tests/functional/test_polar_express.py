"""polar="fast": matrix products alone, within a stated tolerance of the polar factor."""

import itertools

import pytest
import torch
from torch import Tensor

from gomuon.functional import polar, polar_express
from gomuon.functional.polar_express import (
    FAST_STEPS,
    fast_polar,
    multiplies_bfloat16,
    steps_to,
)
from tests.functional.matrices import distance, normal, operator, orthogonal, random_source

# Square, nearly square, and rectangular: iterated on the matrix, or on its Gram matrix.
SHAPES = ((1, 1), (4, 4), (64, 64), (80, 64), (64, 200), (200, 64), (130, 130), (150, 600))
TOLERANCE = 0.01


@pytest.fixture(params=[False, True], ids=["float32", "bfloat16"])
def bfloat16(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """With the last steps in bfloat16, and without; every processor can multiply it."""
    monkeypatch.setattr(polar_express, "multiplies_bfloat16", lambda device: request.param)
    return bool(request.param)


def with_spectrum(m: int, n: int, sigma: Tensor, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """A float32 matrix with these singular values; its polar factor and its right null space."""
    source, k = random_source(seed), min(m, n)
    U, V = orthogonal(m, source)[:, :k], orthogonal(n, source)[:, :k]
    present = sigma > 0
    return ((U * sigma) @ V.T).float(), U[:, present] @ V[:, present].T, V[:, ~present]


def spread_values(k: int, decades: float) -> Tensor:
    return torch.logspace(0, -decades, k, dtype=torch.float64)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("decades", [0.0, 1.0, 2.5])
def test_fast_is_within_its_tolerance(
    shape: tuple[int, int], decades: float, bfloat16: bool
) -> None:
    for seed in range(3):
        X, wanted, _ = with_spectrum(*shape, spread_values(min(shape), decades), seed)
        found = fast_polar(X).double()
        assert distance(found, wanted) <= TOLERANCE / 2
        assert operator(found - wanted) <= TOLERANCE


@pytest.mark.parametrize("shape", [(64, 64), (64, 200), (200, 64)], ids=str)
@pytest.mark.parametrize("rank", [1, 24, 63])
def test_the_null_space_is_left_alone(shape: tuple[int, int], rank: int, bfloat16: bool) -> None:
    """What rounding put into the null space stays below a hundredth of a unit direction."""
    sigma = spread_values(64, 2.0)
    sigma[rank:] = 0
    X, wanted, null = with_spectrum(*shape, sigma)
    found = fast_polar(X).double()
    assert operator(found @ null) <= TOLERANCE
    assert distance(found, wanted) <= TOLERANCE
    assert float(found.square().sum()) == pytest.approx(rank, rel=0.02)
    assert float(polar(X).square().sum()) == pytest.approx(64, rel=1e-3)  # which completes it


def test_rows_and_columns_of_zeros_stay_exactly_zero(bfloat16: bool) -> None:
    X = normal(40, 24, random_source(0)).float()
    X[7], X[:, 3] = 0.0, 0.0
    U = fast_polar(X)
    assert not U[7].any()
    assert not U[:, 3].any()
    assert operator(U.double()) == pytest.approx(1.0, abs=TOLERANCE)


def test_a_small_singular_value_grows_but_not_beyond_one(bfloat16: bool) -> None:
    """Between roundoff and a thousandth of the largest, values end between zero and one."""
    sigma = torch.tensor([1.0, 0.5, 1e-4, 1e-5, 1e-6], dtype=torch.float64)
    found = fast_polar(torch.diag(sigma).float()).diagonal()
    assert found[0] == pytest.approx(1.0, abs=TOLERANCE)
    assert 0.1 < found[2] < 0.3
    assert float(found[4]) < TOLERANCE
    assert all(a > b for a, b in itertools.pairwise(found[1:].tolist()))


@pytest.mark.parametrize("scale", [1e-38, 1e-20, 1.0, 1e20, 1e37])
def test_the_scale_does_not_matter(scale: float) -> None:
    X = normal(48, 32, random_source(1)).float()
    assert distance(fast_polar(X * scale), fast_polar(X)) <= 1e-3


def test_the_steps_follow_from_the_tolerance() -> None:
    assert [steps_to(t) for t in (0.6, 0.2, 0.01, 1e-6)] == [4, 5, 6, 7]
    assert FAST_STEPS == 6
    # The bound holds for every singular value above a thousandth of the largest.
    sigma = torch.logspace(0, -3, 2001, dtype=torch.float64)
    for quintic in itertools.islice(polar_express._fast_quintics(), FAST_STEPS):
        a, b, c = quintic
        sigma = a * sigma + b * sigma**3 + c * sigma**5
    assert float((sigma - 1).abs().max()) <= 0.004


def dominated(side: int) -> Tensor:
    """One large singular value, which is then at the very end of the quintics' interval."""
    source = random_source(5)
    first = normal(side, 1, source) @ normal(1, side, source) / side
    return (first + 0.002 * normal(side, side, source) / side**0.5).float()


@pytest.mark.parametrize("side", [64, 512, 2048])
def test_one_large_singular_value_does_not_grow_without_bound(side: int) -> None:
    """Beyond the interval the quintics are steep: an error of 3e-4 in the norm made steps of 1e11.

    A bound by the Frobenius norm would hide it, so the image of the largest direction is taken.
    """
    X = dominated(side)
    found = fast_polar(X)
    assert float(found.abs().max()) < 1
    v = X.mT @ X @ X[0]
    assert float((found @ v).norm() / v.norm()) == pytest.approx(1.0, abs=TOLERANCE)


@pytest.mark.parametrize("shape", [(512, 512), (256, 512)], ids=str)
def test_rounding_as_coarse_as_tf32_does_no_harm(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Users allow TF32 on accelerators; here its rounding of both sides is imitated."""

    def coarse(X: Tensor) -> Tensor:
        return ((X.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)

    exact_matmul, exact_baddbmm = torch.Tensor.__matmul__, torch.baddbmm
    X = normal(*shape, random_source(6)).float()
    monkeypatch.setattr(polar_express, "multiplies_bfloat16", lambda device: False)
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda A, B: exact_matmul(coarse(A), coarse(B)))
    monkeypatch.setattr(
        polar_express, "symmetric_result", lambda A, B: exact_matmul(coarse(A), coarse(B))
    )
    monkeypatch.setattr(
        torch, "baddbmm", lambda Y, A, B, **scales: exact_baddbmm(Y, coarse(A), coarse(B), **scales)
    )
    found = fast_polar(X)
    monkeypatch.undo()
    assert operator(found.double()) <= 1 + TOLERANCE


def test_in_float64_nothing_is_rounded_to_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    X = normal(32, 32, random_source(2))
    plain = fast_polar(X)
    monkeypatch.setattr(polar_express, "multiplies_bfloat16", lambda device: True)
    assert torch.equal(fast_polar(X), plain)


def test_the_gram_form_is_the_form_on_the_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64 both are the same polynomials of X, to rounding."""
    X = normal(40, 90, random_source(3))
    on_gram = fast_polar(X)
    monkeypatch.setattr(polar_express, "RECTANGULAR", float("inf"))
    assert distance(on_gram, fast_polar(X)) <= 1e-12


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 6])
def test_forming_the_gram_again_changes_nothing_in_float64(
    steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    X = normal(40, 90, random_source(3))
    usual = fast_polar(X)
    monkeypatch.setattr(polar_express, "STEPS_PER_GRAM", steps)
    assert distance(fast_polar(X), usual) <= 1e-10


def test_one_gram_for_all_steps_would_lose_the_small_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Why the Gram matrix is formed again."""
    monkeypatch.setattr(polar_express, "multiplies_bfloat16", lambda device: False)
    X, wanted, _ = with_spectrum(256, 768, spread_values(256, 2.9))
    usual = distance(fast_polar(X).double(), wanted)
    monkeypatch.setattr(polar_express, "STEPS_PER_GRAM", FAST_STEPS)
    assert distance(fast_polar(X).double(), wanted) > 2 * usual


def test_a_bfloat16_step_is_the_step() -> None:
    """Near convergence its rounding error is far below that of plain bfloat16 products."""
    X, _, _ = with_spectrum(64, 64, 1 + 0.1 * spread_values(64, 1.0))
    quintic = polar_express._POLAR_EXPRESS[5]
    a, b, c = quintic
    Y = X[None]
    S = (Y @ Y.mT).double()
    wanted = a * Y.double() + (b * S + c * S @ S) @ Y.double()
    found = polar_express._bfloat16_step(Y, quintic).double()
    y = Y.bfloat16()
    s = y @ y.mT
    plain = a * Y + ((b * s + c * (s @ s)) @ y).float()
    assert distance(found, wanted) <= 2e-3
    assert distance(found, wanted) < 0.5 * distance(plain.double(), wanted)


def test_hardware_without_bfloat16_units_is_known() -> None:
    assert multiplies_bfloat16(torch.device("mps")) is False
    x86 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    assert multiplies_bfloat16(torch.device("cpu")) is bool(x86)
