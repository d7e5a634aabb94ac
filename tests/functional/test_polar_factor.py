"""The support polar: each method, each shape, both precisions, and what it refuses."""

import math
from collections.abc import Callable
from typing import get_args

import pytest
import torch
from hypothesis import given
from torch import Tensor

from gomuon import GoMuon
from gomuon.functional import linalg, polar
from gomuon.functional.mapped_roundoff import null_below
from gomuon.functional.polar_express import exact_by_products
from gomuon.functional.polar_factor import PolarMethod
from tests.functional.matrices import (
    condition,
    distance,
    inner,
    matrices,
    normal,
    nuclear,
    operator,
    orthogonal,
    random_source,
    repeatable,
    roundoff,
    spectrum,
)
from tests.models import train, transformer

METHODS: tuple[PolarMethod, ...] = get_args(PolarMethod)
FAST: tuple[PolarMethod, ...] = ("fast", "auto")  # their own tests are in test_polar_express.py
EXACT: tuple[PolarMethod, ...] = tuple(method for method in METHODS if method not in FAST)
DTYPES = (torch.float32, torch.float64)


def of_condition(m: int, n: int, ratio: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A full-rank matrix of the given condition number, and its polar by construction."""
    source, k = random_source(seed), min(m, n)
    U, V = orthogonal(m, source)[:, :k], orthogonal(n, source)[:, :k]
    return (U * spectrum(k, ratio, source)) @ V.T, U @ V.T


@repeatable
@given(matrices())
def test_svd_is_a_support_polar(X: Tensor) -> None:
    # Every rank: feasible, and its pairing with X reaches the dual norm ‖X‖_*.
    U = polar(X)
    assert U.shape == X.shape
    assert inner(X, U) == pytest.approx(nuclear(X), rel=roundoff())
    assert operator(U) <= 1 + roundoff()


@repeatable
@given(matrices(min_rank=1))
def test_svd_is_semi_orthogonal_at_every_rank(X: Tensor) -> None:
    U = polar(X) if X.shape[0] <= X.shape[1] else polar(X).T
    assert torch.allclose(U @ U.T, torch.eye(len(U), dtype=U.dtype), rtol=0, atol=roundoff())


@repeatable
@given(matrices(full_rank=True))
def test_methods_agree_at_full_rank(X: Tensor) -> None:
    # κ up to 1e8 keeps every singular value above the numerical rank's floor of about 1e-15.
    assert torch.equal(polar(X, "exact"), polar(X))
    assert distance(polar(X, "canonical"), polar(X)) <= roundoff()


@pytest.mark.parametrize("shape", [(4, 7), (7, 4), (5, 5), (1, 6), (6, 1), (1, 1)])
@pytest.mark.parametrize("method", EXACT)
def test_polar_of_a_known_decomposition(shape: tuple[int, int], method: PolarMethod) -> None:
    X, wanted = of_condition(*shape, ratio=1e3)
    assert distance(polar(X, method), wanted) <= roundoff(condition(X))


@pytest.mark.parametrize("method", ["canonical", "exact"])
def test_canonical_is_zero_on_the_null_space(method: PolarMethod) -> None:
    # Exact zeros around a full-rank block: rank 2 in a 4×5 matrix, with no rounding in it.
    block, wanted = of_condition(2, 2, ratio=10.0)
    X = torch.zeros(4, 5, dtype=torch.float64)
    X[1:3, 2:4] = block
    U = polar(X, method)
    assert torch.allclose(U[1:3, 2:4], wanted, rtol=0, atol=1e-13)
    U[1:3, 2:4] = 0
    assert float(U.abs().max()) <= 1e-14
    # The compact polar fills the same space instead.
    assert float(polar(X).norm()) == pytest.approx(2.0)


def test_canonical_of_rank_one_is_the_unit_outer_product() -> None:
    column, row = torch.tensor([[1.0], [2.0], [2.0]]), torch.tensor([[3.0, 4.0]])
    assert torch.allclose(polar(column @ row, "canonical"), column @ row / 15, rtol=0, atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 3), (3, 2), (1, 1)])
def test_zero_gives_zero(shape: tuple[int, int], dtype: torch.dtype, method: PolarMethod) -> None:
    assert torch.equal(polar(torch.zeros(shape, dtype=dtype), method), torch.zeros(shape))
    batch = torch.zeros(3, *shape, dtype=dtype)
    batch[1] = normal(*shape, random_source(0)).to(dtype)
    U = polar(batch, method)
    assert not U[0].any()
    assert not U[2].any()
    assert torch.allclose(U[1], polar(batch[1], method), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("shape", [(24, 16), (16, 24), (16, 16)])
def test_exact_by_products_agrees_with_svd_at_condition_1e3(
    shape: tuple[int, int], dtype: torch.dtype, tolerance: float
) -> None:
    for seed in range(10):
        X = of_condition(*shape, ratio=1e3, seed=seed)[0].to(dtype)
        assert distance(exact_by_products(X), polar(X)) <= tolerance


def test_exact_by_products_reaches_condition_1e4() -> None:
    X, wanted = of_condition(16, 16, ratio=1e4)
    assert distance(exact_by_products(X), wanted) <= roundoff(condition(X))


# ---- the null space ------------------------------------------------------------------------------

# Every exact way of leaving it alone; the last is what "exact" takes on accelerators.
CANONICAL = {
    "canonical": lambda X: polar(X, "canonical"),
    "exact": lambda X: polar(X, "exact"),
    "accelerators": lambda X: exact_by_products(X),
}
EVERY_CANONICAL = pytest.mark.parametrize("canonical", CANONICAL.values(), ids=list(CANONICAL))


@EVERY_CANONICAL
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(48, 48), (64, 24), (24, 64)])
def test_noise_of_rounding_is_left_alone(
    shape: tuple[int, int], dtype: torch.dtype, canonical: Callable[[Tensor], Tensor]
) -> None:
    """A rank that only rounding gave the matrix: the update must not contain it."""
    k = min(shape)
    source = random_source(3)
    U, V = orthogonal(shape[0], source)[:, :k], orthogonal(shape[1], source)[:, :k]
    sigma = spectrum(k, 100.0, source)
    sigma[-3:] = 0
    present = (sigma > 0).double()
    wanted = (U * present) @ V.T
    X = ((U * sigma) @ V.T).to(dtype)  # full rank, by rounding
    assert float(torch.linalg.svdvals(X.double())[-1]) > 0
    tolerance = 1e-4 if dtype == torch.float32 else 1e-11
    assert distance(canonical(X).double(), wanted) <= tolerance
    assert distance(polar(X, "svd").double(), wanted) > 0.1  # which completes it


@EVERY_CANONICAL
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_threshold_lies_at_32_times_the_precision(
    dtype: torch.dtype, canonical: Callable[[Tensor], Tensor]
) -> None:
    threshold = null_below(dtype)
    assert threshold == 32 * torch.finfo(dtype).eps
    for share, expected in ((0.1, 0.0), (10.0, 1.0)):
        X = torch.diag(torch.tensor([1.0, 0.5, share * threshold], dtype=dtype))
        U = canonical(X)
        assert float(U[2, 2]) == pytest.approx(expected, abs=2e-2 * expected + 1e-4)
        assert float(U[0, 0]) == pytest.approx(1.0, abs=1e-5)


@EVERY_CANONICAL
def test_the_size_does_not_move_the_threshold(canonical: Callable[[Tensor], Tensor]) -> None:
    """One small singular value among many equal ones, as far from σ₁ as condition 1e4."""
    sigma = torch.ones(600)
    sigma[-1] = 1e-4
    assert float(canonical(torch.diag(sigma))[-1, -1]) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 5), (5, 3)])
def test_a_batch_is_its_loop_and_keeps_the_dtype(
    shape: tuple[int, int], dtype: torch.dtype, method: PolarMethod
) -> None:
    X = torch.stack([of_condition(*shape, ratio=10.0, seed=s)[0] for s in range(6)]).to(dtype)
    X = X.view(2, 3, *shape)
    U = polar(X, method)
    assert (U.dtype, U.shape) == (dtype, X.shape)
    # The order of sums may differ; products in bfloat16 round them to eight bits.
    rounded = method in FAST and dtype == torch.float32
    atol = 4e-3 if rounded else 100 * torch.finfo(dtype).eps
    for i in range(2):
        for j in range(3):
            assert torch.allclose(U[i, j], polar(X[i, j], method), rtol=0, atol=atol)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_the_scale_does_not_matter(scale: float, method: PolarMethod) -> None:
    X, wanted = of_condition(4, 3, ratio=10.0)
    U = polar((X * scale).float(), method)
    assert torch.allclose(U.double(), wanted, rtol=0, atol=5e-3 if method in FAST else 1e-5)


@pytest.mark.parametrize(
    "X",
    [
        torch.ones(2, 2, dtype=torch.int64),
        torch.ones(2, 2, dtype=torch.bfloat16),
        torch.ones(2, 2, dtype=torch.complex64),
        torch.ones(3),
        torch.tensor(1.0),
    ],
    ids=["integer", "bfloat16", "complex", "vector", "scalar"],
)
def test_anything_but_a_floating_matrix_is_refused(X: Tensor) -> None:
    with pytest.raises(
        ValueError, match=r"^X (needs a floating-point dtype|needs float32|must be)"
    ):
        polar(X)


def test_an_unknown_method_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'newton'"):
        polar(torch.eye(2), "newton")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="method must be the name"):
        polar(torch.eye(2), ["svd"])  # type: ignore[arg-type]


def test_what_is_no_tensor_is_refused_by_type() -> None:
    with pytest.raises(TypeError, match="X must be a tensor"):
        polar([[1.0]])  # type: ignore[arg-type]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_non_finite_matrix_gives_nan_and_costs_no_other(
    value: float, dtype: torch.dtype, method: PolarMethod
) -> None:
    X = torch.stack([torch.eye(3), 2 * torch.eye(3)]).to(dtype)
    X[0, 1, 1] = value
    U = polar(X, method)
    assert U[0].isnan().any()
    assert torch.allclose(U[1], torch.eye(3, dtype=dtype), atol=5e-3 if method in FAST else 1e-6)
    assert polar(X[0], method).isnan().any()


def hard(m: int, n: int, ratio: float, kind: str, seed: int) -> Tensor:
    """A float32 matrix of that condition number: singular values spread, or half of them small."""
    source, k = random_source(seed), min(m, n)
    U, V = orthogonal(m, source)[:, :k], orthogonal(n, source)[:, :k]
    sigma = torch.logspace(0, -math.log10(ratio), k, dtype=torch.float64)
    if kind == "half":
        sigma = torch.where(torch.arange(k) < k // 2, 1.0, 1 / ratio).double()
    return ((U * sigma) @ V.T).float()


@pytest.mark.parametrize("kind", ["spread", "half"])
@pytest.mark.parametrize("ratio", [1.0, 1e2, 1e4])
@pytest.mark.parametrize("shape", [(64, 64), (96, 32), (32, 96), (128, 8)])
def test_exact_is_within_1e_5_of_the_float64_svd_to_condition_1e4(
    shape: tuple[int, int], ratio: float, kind: str
) -> None:
    for seed in range(5):
        X = hard(*shape, ratio=ratio, kind=kind, seed=seed)
        exact = polar(X.double())
        assert distance(polar(X, "exact").double(), exact) <= 1e-5  # the CPU's choice
        assert distance(exact_by_products(X).double(), exact) <= 1e-5  # accelerators'


def lapack(X: Tensor) -> Tensor:
    """UVᵀ of LAPACK's SVD in X's own precision."""
    U, _, Vh = torch.linalg.svd(X, full_matrices=False)
    return U @ Vh


def test_a_float32_svd_would_not_do() -> None:
    X = hard(64, 64, ratio=1e4, kind="half", seed=0)
    assert distance(lapack(X).double(), polar(X.double())) > 1e-4


def test_the_gram_route_beats_the_float32_svd_where_it_applies() -> None:
    X = hard(96, 64, ratio=1e5, kind="half", seed=0)
    exact = polar(X.double())
    assert distance(polar(X).double(), exact) < 1e-3 * distance(lapack(X).double(), exact)


@pytest.mark.parametrize("ratio", [1e7, 1e30])
def test_where_the_gram_holds_too_little_svd_completes_by_lapack(ratio: float) -> None:
    X = hard(48, 32, ratio=ratio, kind="half", seed=0)
    assert torch.equal(polar(X), lapack(X))
    mixed = torch.stack([X, hard(48, 32, ratio=10.0, kind="half", seed=1), torch.zeros(48, 32)])
    U = polar(mixed)
    assert torch.allclose(U[0], lapack(X), atol=1e-6)
    assert torch.allclose(U[1], polar(mixed[1]), atol=1e-6)
    assert not U[2].any()


@pytest.mark.parametrize("method", ["svd", "canonical"])
@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_the_gram_route_does_not_mind_the_scale(scale: float, method: PolarMethod) -> None:
    X = hard(24, 16, ratio=1e3, kind="spread", seed=0)
    assert distance(polar(X * scale, method), polar(X, method)) <= 1e-4


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (0, 5), (5, 0)])
def test_of_nothing_comes_nothing(shape: tuple[int, ...], method: PolarMethod) -> None:
    assert polar(torch.zeros(shape), method).shape == shape


def test_exact_on_accelerators_decomposes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The branch that "exact" takes on an accelerator, run on the CPU."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(3, 24, 16, generator=generator)
    X[1] *= torch.logspace(0, -4, 16)  # singular values over four decades
    X[2] = X[2, :, :1] * X[2, :1, :]  # of rank one
    expected = polar(X, "canonical")

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a decomposition")

    monkeypatch.setattr(linalg, "decomposes_well", lambda device: False)
    for routine in ("eigh", "svd", "qr"):
        monkeypatch.setattr(torch.linalg, routine, refuse)
    found = polar(X, "exact")
    assert float((found - expected).abs().max()) < 1e-5


def test_an_exact_step_on_accelerators_is_the_step_of_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, twin = (transformer(layers=1, dtype=torch.float32) for _ in range(2))
    train(model, GoMuon(model, polar="exact"), range(6))
    monkeypatch.setattr(linalg, "decomposes_well", lambda device: False)
    train(twin, GoMuon(twin, polar="exact"), range(6))
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-5, msg=name)
