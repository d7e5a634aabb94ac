"""Rows of which several ranks take a part each: the parts' sums are those of all rows."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from gomuon.parameters.divided_rows import divided
from gomuon.parameters.rows import ConvRows, LinearRows, Rows
from gomuon.parameters.sampling import Sampling
from gomuon.parameters.tensor_shards import TensorShard

CONV = (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1)


@dataclass(frozen=True)
class Mesh:
    """As much of a device mesh as parts of rows need where nothing is cut."""

    parts: int
    index: int

    def size(self) -> int:
        return self.parts

    def get_local_rank(self) -> int:
        return self.index


def parts_of(rows: Rows, parts: int) -> list[Any]:
    return [divided(rows, TensorShard(Mesh(parts, index))) for index in range(parts)]


def total(rows: Tensor) -> Tensor:
    return rows.mT @ rows


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
@pytest.mark.parametrize(
    ("rows", "shape"),
    [
        (LinearRows(), (2, 3, 4)),
        (LinearRows(Sampling(ones=True)), (5, 4)),
        (LinearRows(Sampling(rows=5)), (3, 4, 4)),
        (LinearRows(Sampling(stride=2, skip=1)), (2, 5, 4)),
        (LinearRows(Sampling(reduce=True)), (4, 3, 4)),
        (ConvRows(*CONV, groups=1, sampling=Sampling(ones=True)), (2, 4, 3, 3)),
        (ConvRows(*CONV, groups=2), (2, 4, 3, 3)),
    ],
)
def test_parts_add_up_to_all_rows(rows: Rows, shape: tuple[int, ...], parts: int) -> None:
    torch.manual_seed(0)
    x, g = torch.randn(2, *shape, dtype=torch.float64)
    each = parts_of(rows, parts)
    torch.testing.assert_close(sum(total(r.inputs(x)) for r in each), total(rows.inputs(x)))
    torch.testing.assert_close(sum(total(r.gradients(g)) for r in each), total(rows.gradients(g)))
    assert sum(r.uses(g) for r in each) == rows.uses(g)
    assert [r.sampled(g) for r in each] == [r.gradients(g).shape[-2] for r in each]
    assert sum(r.sampled(g) for r in each) == rows.sampled(g)


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_parts_of_a_mask_fit_the_rows_and_count_every_use_once(parts: int) -> None:
    torch.manual_seed(0)
    x, mask = torch.randn(3, 4, 6, dtype=torch.float64), torch.randint(0, 2, (3, 4)).double()
    rows = LinearRows(Sampling(rows=7))
    each = parts_of(rows, parts)
    masked = [r.inputs(x) * r.mask_rows(mask) for r in each]
    torch.testing.assert_close(
        sum(map(total, masked)), total(rows.inputs(x) * rows.mask_rows(mask))
    )
    assert sum(float(r.own_mask(mask).sum()) for r in each) == float(mask.sum())


@pytest.mark.parametrize(
    ("dim", "x", "y", "fits"),
    [
        (0, (5, 8), (5, 3), (True, True)),  # column-parallel: δ is cut
        (0, (5, 8), (5, 6), (True, False)),
        (1, (5, 4), (5, 6), (True, True)),  # row-parallel: x is cut
        (1, (5, 8), (5, 6), (False, True)),
        (None, (5, 8), (5, 6), (True, True)),
        (None, (5, 4), (5, 6), (False, True)),
    ],
)
@pytest.mark.parametrize("ones", [False, True])
def test_a_rank_has_some_columns_of_a_whole_moment(
    dim: int | None, x: tuple[int, int], y: tuple[int, int], fits: tuple[bool, bool], ones: bool
) -> None:
    rows = divided(LinearRows(Sampling(ones=ones)), TensorShard(Mesh(2, 0), dim))
    side = 8 + ones
    here, output = torch.ones(x), torch.ones(y)
    found = rows.fits_input(here, output, (side, side)), rows.fits_output(output, (6, 6))
    assert found == fits
