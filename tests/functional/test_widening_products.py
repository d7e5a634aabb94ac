"""Half precision is multiplied as it is where sums are float32, and nothing is lost by it."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gomuon.functional import widening_products
from gomuon.functional.linalg import symmetric_product
from gomuon.functional.widening_products import has_widening_product, widening_product
from gomuon.parameters.rows import SumCut, moment
from gomuon.parameters.side_forms import LEFT, SideForm
from tests.versions import HAS_WIDENING_PRODUCTS

HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A CPU with such products, so that the accelerator's branch runs with real numbers."""
    if not HAS_WIDENING_PRODUCTS:
        pytest.skip("torch is older than 2.8")

    def product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
        return left.to(dtype) @ right.to(dtype)

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("mm.dtype", product, "CPU")
        library.impl("bmm.dtype", product, "CPU")
        monkeypatch.setattr(widening_products, "_DEVICES", frozenset({"cpu"}))
        yield


def moment_of(rows: Tensor) -> Tensor:
    """Σ v vᵀ in float32 of rows [N, d], or [groups, N, d]."""
    groups = 1 if rows.ndim == 2 else len(rows)
    return moment(rows, torch.float32, SumCut(groups, SideForm(rows.shape[-1]), LEFT))


class Dtypes(TorchDispatchMode):
    """Records what is cast and what is multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.cast: list[tuple[int, ...]] = []
        self.multiplied: list[tuple[torch.dtype, torch.dtype]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm):
            with torch.utils._python_dispatch._disable_current_modes():
                result = func(*args, **(kwargs or {}))
            self.multiplied.append((args[0].dtype, result.dtype))
            return result
        if func.overloadpacket is torch.ops.aten._to_copy:
            self.cast.append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


SHAPES = [(50, 30), (4, 50, 30), (40, 300), (2, 40, 300)]


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_are_multiplied_as_they_are(shape: tuple[int, ...], half: torch.dtype) -> None:
    rows = torch.randn(shape).to(half)
    with Dtypes() as seen:
        found = moment_of(rows)
    assert not seen.cast
    assert set(seen.multiplied) == {(half, torch.float32)}
    exact = rows.double().mT @ rows.double()
    # A sum of N exact products, each rounded to float32: N/2 roundings at the most.
    sizes = rows.double().abs()
    bound = shape[-2] / 2 * torch.finfo(torch.float32).eps * (sizes.mT @ sizes)
    assert bool(((found - exact).abs() <= bound).all())
    assert torch.equal(found, symmetric_product(rows.float()))


@pytest.mark.parametrize("half", HALVES)
def test_elsewhere_rows_are_cast(half: torch.dtype) -> None:
    rows = torch.randn(40, 30).to(half)
    with Dtypes() as seen:
        found = moment_of(rows)
    assert seen.cast == [(40, 30)]
    assert seen.multiplied == [(torch.float32, torch.float32)]
    assert torch.equal(found, rows.float().mT @ rows.float())


def test_products_of_halves_are_exact_in_float32() -> None:
    """All pairs of mantissas; so half precision loses nothing but what its numbers already lost."""
    for half, bits in ((torch.bfloat16, 8), (torch.float16, 11)):
        numbers = torch.arange(2 ** (bits - 1), 2**bits, dtype=torch.float64)
        assert torch.equal(numbers.to(half).double(), numbers)
        pairs = numbers[:, None] * numbers
        assert torch.equal(pairs.float().double(), pairs)


@pytest.mark.usefixtures("accelerator")
def test_what_would_lose_accuracy_is_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {dtype: torch.ones(3, 2, dtype=dtype) for dtype in (*HALVES, torch.float32)}
    assert [has_widening_product(v, torch.float32) for v in rows.values()] == [True, True, False]
    assert not has_widening_product(rows[torch.bfloat16], torch.float64)
    assert not has_widening_product(rows[torch.bfloat16][:0], torch.float32)
    assert not has_widening_product(rows[torch.bfloat16].to("meta"), torch.float32)

    class Settings:
        allow_fp16_accumulation = True

    monkeypatch.setattr(torch.backends.cuda, "matmul", Settings)
    assert [has_widening_product(v, torch.float32) for v in rows.values()] == [True, False, False]


@pytest.mark.usefixtures("accelerator")
def test_it_can_be_traced() -> None:
    for half in HALVES:
        rows = torch.randn(20, 10).to(half)
        compiled = torch.compile(moment_of, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(rows), moment_of(rows))


@pytest.mark.skipif(not HAS_WIDENING_PRODUCTS, reason="torch is older than 2.8")
def test_a_products_shape_on_another_device() -> None:
    """On the meta device, whose kernels have the signature of the accelerators'."""
    left, right = (torch.empty(2, 3, 5, dtype=torch.bfloat16, device="meta") for _ in range(2))
    for product in (widening_product(left.mT, right), widening_product(left[0].mT, right[0])):
        assert (product.shape[-2:], product.dtype) == ((5, 5), torch.float32)
