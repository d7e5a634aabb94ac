"""Inverse roots by products: polynomials, accuracy, floor, and what they do not do."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gomuon.functional import inverse_root, linalg, matched_direction
from gomuon.functional.factors import RootMethod
from gomuon.functional.product_roots import _steps, product_count, product_root
from tests.counting import counted
from tests.functional.matrices import (
    ALPHAS,
    EPS,
    Factor,
    distance,
    factors,
    normal,
    orthogonal,
    random_source,
    repeatable,
    roundoff,
)

POWERS = (*ALPHAS, 0.3, 1 / 3, 1.0)

# ---- polynomials ---------------------------------------------------------------------------------


def test_the_polynomials_of_a_condition_number_of_1e4() -> None:
    """Against numbers from elsewhere, for the inverse fourth root."""
    quadratics, _ = _steps(4, 1e-4, 1e-8)
    published = (
        (3.85003, -10.8539, 8.61893),
        (1.80992, -0.587778, 0.0647852),
        (1.50394, -0.594516, 0.121161),
    )
    for found, expected in zip(quadratics, published, strict=False):
        assert found == pytest.approx(expected, rel=5e-6)
    assert quadratics[-1] == (45 / 32, -9 / 16, 5 / 32)
    assert len(quadratics) == 5


@pytest.mark.parametrize("order", [1, 2, 3, 4, 8, 10, 100])
@pytest.mark.parametrize("smallest", [0.9, 0.1, 1e-3, 1e-5, 1e-10])
@pytest.mark.parametrize("tolerance", [1e-5, 1e-13])
def test_the_polynomials_keep_their_promise(order: int, smallest: float, tolerance: float) -> None:
    quadratics, highest = _steps(order, smallest, tolerance)
    start = torch.logspace(math.log10(smallest), 0, 20_001, dtype=torch.float64)
    p, root = start, torch.ones_like(start)
    for index, (a, b, c) in enumerate(quadratics):
        if index == len(quadratics) - 1:
            assert float(p.max()) <= highest * (1 + 1e-6)
        w = a + b * p + c * p**2
        p, root = p * w**order, root * w
    error = float((root * start ** (1 / order) - 1).abs().max())
    assert error <= tolerance * (1 + 1e-6) + 100 * EPS


def test_five_steps_reach_1e5_and_the_usual_limit_steps_only_1e4() -> None:
    """Why the polynomials are made for 1e-5: the same number of steps, ten times the reach."""
    assert len(_steps(4, 1e-5, 1e-5)[0]) == len(_steps(4, 1e-4, 1e-5)[0]) == 5


# ---- accuracy ------------------------------------------------------------------------------------


@repeatable
@given(factors(), st.sampled_from(POWERS))
def test_the_root_of_a_known_spectrum(factor: Factor, power: float) -> None:
    root, fine = product_root(factor.power(1), power)
    assert bool(fine)
    # Beside what eigh is held to, what the polynomials leave and lose.
    assert distance(root, factor.power(-power)) <= 1e-9 + roundoff(factor.condition)
    assert torch.equal(root, root.T)


def spectra(d: int, condition: float) -> dict[str, Tensor]:
    """Eigenvalues spread evenly over their magnitudes, and most of them at the lower end."""
    even = torch.logspace(0, -math.log10(condition), d, dtype=torch.float64)
    low = torch.full((d,), 1 / condition, dtype=torch.float64)
    low[: d // 8] = torch.logspace(0, -math.log10(condition), d // 8, dtype=torch.float64)
    return {"even": even, "low": low}


@pytest.mark.parametrize("spectrum", ["even", "low"])
@pytest.mark.parametrize(("condition", "bound"), [(1e3, 1e-9), (1e4, 1e-9), (1e5, 1e-6)])
def test_the_direction_of_float32_roots(spectrum: str, condition: float, bound: float) -> None:
    """1 − cos of D, with products and with eigh in float32, against float64."""
    d, source = 64, random_source(0)
    sides = [Factor(orthogonal(d, source), spectra(d, condition)[spectrum]) for _ in range(2)]
    M = normal(d, d, source)

    def away(left: Tensor, right: Tensor) -> float:
        D = matched_direction(M, left.double(), right.double())
        return 1 - float((D * exact).sum() / D.norm() / exact.norm())

    exact = matched_direction(M, sides[0].power(-1 / 4), sides[1].power(-1 / 4))
    found = {
        method: away(*(inverse_root(side.power(1).float(), 1 / 4, method) for side in sides))
        for method in ("eigh", "products")
    }
    assert found["products"] <= bound
    assert found["products"] <= found["eigh"]


@pytest.mark.parametrize("power", POWERS)
def test_float32_is_near_float64(power: float) -> None:
    source = random_source(1)
    factor = Factor(orthogonal(48, source), spectra(48, 1e3)["even"])
    root, fine = product_root(factor.power(1).float(), power)
    assert bool(fine)
    assert root.dtype == torch.float32
    assert distance(root.double(), factor.power(-power)) < 1e-4


@pytest.mark.parametrize("power", [0.123456, 0.4999, math.pi / 10])
def test_any_power_is_a_fraction_at_most_that_far(power: float) -> None:
    factor = Factor(orthogonal(6, random_source(2)), spectra(6, 1e4)["even"])
    root, _ = product_root(factor.power(1), power)
    # The nearest fraction is within 1/(100·denominator) of the power, as in ln(κ) times that.
    assert distance(root, factor.power(-power)) < math.log(1e4) * 2e-3


@pytest.mark.parametrize("scale", [1e-42, 1e-30, 1e30])
def test_the_scale_does_not_matter(scale: float) -> None:
    S = torch.diag(torch.tensor([1.0, 0.25, 0.01])) * scale
    root, fine = product_root(S, 0.25)
    assert bool(fine)
    assert torch.allclose(root.diagonal(), S.diagonal().pow(-0.25), rtol=1e-3, atol=0)


# ---- the floor -----------------------------------------------------------------------------------


@pytest.mark.parametrize("power", [1 / 8, 1 / 4, 1 / 2, 1.0])
@pytest.mark.parametrize(("d", "rank"), [(96, 1), (96, 8), (300, 20)])
def test_singular_factors_have_a_floor(power: float, d: int, rank: int) -> None:
    """Rounding makes zero eigenvalues negative; the root stays positive and bounded."""
    G = normal(d, rank, random_source(3)).float()
    root, fine = product_root(G @ G.T, power)
    assert bool(fine)
    values = torch.linalg.eigvalsh(root.double())
    assert float(values[0]) > 0
    assert 2e5 < float(values[-1] / values[0]) ** (1 / power) < 2e6
    # What was zero is treated alike: the root is a multiple of the identity there.
    flat = values[rank:] / values[-1]
    assert float(flat.min()) > 0.95


def test_the_floor_is_smooth_and_monotone() -> None:
    eigenvalues = torch.logspace(0, -9, 200, dtype=torch.float64).float()
    S = torch.diag(eigenvalues)
    root = product_root(S, 0.25)[0].diagonal()
    assert bool((root.diff() >= -1e-5 * root[1:]).all())
    assert float(root.max()) < 40


@pytest.mark.parametrize("power", POWERS)
def test_the_zero_matrix_gives_the_identity(power: float) -> None:
    root, fine = product_root(torch.zeros(2, 3, 3), power)
    assert torch.equal(root, torch.eye(3).expand(2, 3, 3))
    assert bool(fine.all())


# ---- a cap on the condition number ---------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("max_condition", [1.5, 30.0, 1e3, 1e5])
@pytest.mark.parametrize("power", [1 / 4, 1 / 2])
def test_both_forms_cap_the_condition_alike(
    power: float, max_condition: float, dtype: torch.dtype
) -> None:
    factor = Factor(orthogonal(40, random_source(4)), spectra(40, 1e7)["even"])
    capped = Factor(factor.basis, factor.eigenvalues + 1 / (max_condition - 1))
    # Rounding errors of S itself are ε of its largest eigenvalue, which is one.
    rounding = torch.finfo(dtype).eps * max_condition
    errors: dict[RootMethod, float] = {"eigh": 1e-5, "products": 0.01}  # how λ_max is known
    for method, error in errors.items():
        bound = rounding + error
        root = inverse_root(factor.power(1).to(dtype), power, method, max_condition).double()
        assert distance(root, capped.power(-power)) < bound, method
        values = torch.linalg.eigvalsh(root)
        assert float(values[-1] / values[0]) ** (1 / power) < 1.01 * max_condition


def test_a_cap_far_above_the_condition_changes_little() -> None:
    S = torch.diag(torch.tensor([1.0, 0.1], dtype=torch.float64))
    for method in ("eigh", "products"):
        capped = inverse_root(S, 0.25, method, 1e9)
        assert torch.allclose(capped, inverse_root(S, 0.25, method), rtol=1e-8, atol=1e-8)


def test_a_small_cap_needs_fewer_products() -> None:
    counts = [product_count(0.25, torch.float32, shift) for shift in (1.0, 1e-2, 1e-4, 0.0, 1e-6)]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]


# ---- what cannot be trusted ----------------------------------------------------------------------


@pytest.mark.parametrize("power", [1 / 4, 1 / 2, 1.0])
def test_what_is_not_semi_definite_is_not_trusted(power: float) -> None:
    S = torch.diag(torch.tensor([1.0, 0.5, 0.3])).repeat(4, 1, 1)
    S[1, 2, 2] = -0.1
    S[2, 0, 0] = torch.nan
    S[3, 0, 0] = torch.inf
    root, fine = product_root(S, power)
    assert fine.tolist() == [True, False, False, False]
    alone, _ = product_root(S[0], power)
    assert torch.allclose(root[0], alone, rtol=1e-5, atol=0)


def test_what_is_not_trusted_is_decomposed() -> None:
    S = torch.diag(torch.tensor([1.0, 0.5, -0.1])).repeat(2, 1, 1)
    S[1, 2, 2] = 0.1
    found = inverse_root(S, 1 / 4, "products")
    assert torch.equal(found[0], inverse_root(S[0], 1 / 4))
    assert torch.allclose(found[1], inverse_root(S[1], 1 / 4), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("digits", [8, 11])
def test_products_of_low_precision_are_noticed(
    digits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What bfloat16 or TF32 would do: the entries of every product are rounded."""
    factor = Factor(orthogonal(64, random_source(5)), spectra(64, 1e5)["even"])
    S = factor.power(1).float()
    real = torch.Tensor.__matmul__

    def rounded(X: Tensor) -> Tensor:
        mantissa, exponent = torch.frexp(X)
        return torch.ldexp((mantissa * 2**digits).round() / 2**digits, exponent)

    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda X, Y: real(rounded(X), rounded(Y)))
    assert not bool(product_root(S, 0.25)[1])


# ---- batches, and what is not done ---------------------------------------------------------------


def test_a_batch_is_its_loop() -> None:
    X = normal(30, 5, random_source(6)).view(2, 3, 5, 5)
    S = X @ X.mT
    S[1, 2] = 0
    roots, fine = product_root(S, 0.25)
    assert fine.shape == (2, 3)
    for index in range(6):
        alone, _ = product_root(S.view(6, 5, 5)[index], 0.25)
        assert distance(roots.view(6, 5, 5)[index], alone) < 1e-9


@pytest.mark.parametrize("shape", [(0, 3, 3), (0, 0), (2, 0, 0)])
def test_of_nothing_comes_nothing(shape: tuple[int, ...]) -> None:
    root, fine = product_root(torch.zeros(shape), 0.25)
    assert (root.shape, fine.shape) == (shape, shape[:-2])


class Recorder(TorchDispatchMode):
    """The names of all operations, and the dtypes of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.names.add(func.overloadpacket.__name__)
        results = result if isinstance(result, (tuple, list)) else [result]
        self.dtypes |= {tensor.dtype for tensor in results if isinstance(tensor, Tensor)}
        return result


@pytest.mark.parametrize("power", POWERS)
@pytest.mark.parametrize("shift", [0.0, 1e-3])
def test_nothing_is_decomposed_read_or_widened(power: float, shift: float) -> None:
    X = normal(12, 12, random_source(7)).float()
    S = (X @ X.T).repeat(3, 1, 1)
    with Recorder() as seen:
        product_root(S, power, shift)
    assert seen.dtypes <= {torch.float32, torch.bool, torch.int64}  # int64 is an index
    waits = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "_to_copy"}
    assert not seen.names & waits
    assert not [name for name in seen.names if "linalg" in name and name != "linalg_vector_norm"]


@pytest.mark.parametrize("power", [*POWERS, 0.7, 2.0])
@pytest.mark.parametrize("shift", [0.0, 1e-6, 1e-2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_number_of_products(power: float, shift: float, dtype: torch.dtype) -> None:
    S = torch.eye(4, dtype=dtype).repeat(3, 1, 1)
    flops, calls = counted(lambda: product_root(S, power, shift))
    assert flops == 3 * product_count(power, dtype, shift) * 2 * 4**3
    assert not calls


def test_a_fourth_root_takes_five_steps() -> None:
    # P² five times, XW four times, and W²PW² four times by three products.
    assert product_count(0.25, torch.float32) == 5 + 4 + 4 * 3


def test_auto_takes_products_where_decompositions_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    S = torch.diag(torch.tensor([1.0, 0.3]))
    assert torch.equal(inverse_root(S, 0.25, "auto"), inverse_root(S, 0.25, "eigh"))
    monkeypatch.setattr(linalg, "decomposes_well", lambda device: False)
    assert torch.equal(inverse_root(S, 0.25, "auto"), inverse_root(S, 0.25, "products"))
    flops, calls = counted(lambda: inverse_root(S, 0.25, "auto"))
    assert flops > 0
    assert not calls


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"method": "svd"}, ValueError, "root method must be one of .*'products'.*got 'svd'"),
        ({"method": 3}, TypeError, "method"),
        ({"max_condition": 1}, ValueError, "max_condition > 1, got 1"),
        ({"max_condition": float("inf")}, ValueError, "max_condition > 1, got inf"),
        ({"max_condition": "10"}, TypeError, "max_condition > 1, got '10'"),
    ],
)
def test_bad_arguments_are_named(
    arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        inverse_root(torch.eye(2), 0.25, **arguments)
