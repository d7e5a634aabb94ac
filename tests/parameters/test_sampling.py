"""A bounded number of rows is spread evenly over examples and positions."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from gomuon.parameters.rows import rows_for
from gomuon.parameters.sampling import Sampling, spread_rows, unravelled

CPU = torch.device("cpu")


def spread(total: int, limit: int) -> Tensor:
    return spread_rows(total, limit, CPU)


@pytest.mark.parametrize("total", [2, 3, 7, 64, 100, 257, 5000])
def test_the_rows_are_different_in_order_and_one_from_each_stretch(total: int) -> None:
    for limit in range(1, min(total, 400)):
        index = spread(total, limit)
        stretch = torch.arange(limit)
        assert len(index) == limit
        assert bool((index >= stretch * total // limit).all())
        assert bool((index < (stretch + 1) * total // limit).all())


def shares(index: Tensor, classes: int) -> Tensor:
    """How many rows each class has, divided by the mean."""
    return torch.bincount(index, minlength=classes) * classes / len(index)


def batches() -> Iterator[tuple[int, int, int]]:
    """Examples, positions and a bound; many share factors, as real sizes do."""
    for batch, positions, limit in product(
        (4, 32, 33, 64, 256),
        (16, 30, 64, 100, 128, 196, 256, 1000, 1024, 3136),
        (512, 513, 1000, 1024, 2048, 4096),
    ):
        if 2 * limit <= batch * positions:
            yield batch, positions, limit


def test_every_example_has_its_share() -> None:
    for batch, positions, limit in batches():
        number = torch.bincount(spread(batch * positions, limit) // positions, minlength=batch)
        assert float((number - limit / batch).abs().max()) < 2, (batch, positions, limit)


def test_every_part_of_the_sequence_has_its_share() -> None:
    for batch, positions, limit in batches():
        part = spread(batch * positions, limit) % positions * 4 // positions
        found = shares(part, 4)
        assert 0.75 < float(found.min()) <= float(found.max()) < 1.25, (batch, positions, limit)


def worst_phase(index: Tensor, positions: int) -> float:
    """The smallest share of positions that are equal modulo some divisor of their number."""
    return min(
        float(shares(index % positions % divisor, divisor).min())
        for divisor in range(2, positions + 1)
        if positions % divisor == 0 and len(index) >= 64 * divisor
    )


def test_no_phase_of_the_positions_is_left_out() -> None:
    for batch, positions, limit in batches():
        found = worst_phase(spread(batch * positions, limit), positions)
        assert found > 0.5, (batch, positions, limit)


def test_a_fixed_stride_would_leave_phases_out() -> None:
    """The test above can fail: eight divides 64, so every eighth row is at eight positions only."""
    every_eighth = torch.arange(512) * (64 * 64) // 512
    assert len((every_eighth % 64).unique()) == 8
    assert worst_phase(every_eighth, 64) == 0
    assert len((spread(64 * 64, 512) % 64).unique()) == 64


def test_coordinates_of_flat_indices() -> None:
    index = torch.arange(2 * 3 * 5)
    coordinates = unravelled(index, (2, 3, 5))
    assert torch.equal(index.view(2, 3, 5)[tuple(coordinates)], index)


MODULES: list[tuple[nn.Module, tuple[int, ...]]] = [
    (nn.Linear(3, 4), (9, 3)),
    (nn.Linear(3, 4), (3,)),
    (nn.Linear(3, 4), (4, 6, 3)),
    (nn.Linear(3, 4), (4, 0, 3)),
    (nn.Linear(3, 4), (4, 2, 5, 3)),
    (nn.Conv1d(3, 4, 2), (4, 3, 9)),
    (nn.Conv2d(4, 4, 2, groups=2), (5, 4, 5, 6)),
    (nn.Conv2d(4, 4, 2), (4, 5, 6)),
]
SAMPLINGS = [
    Sampling(stride, skip, reduce, ones, rows)
    for stride, skip, reduce, ones, rows in product(
        (1, 2, 3), (0, 1, 50), (False, True), (False, True), (None, 1, 3, 7, 1000)
    )
]


@pytest.mark.parametrize(("module", "shape"), MODULES, ids=str)
def test_the_number_of_rows_is_known_from_the_shape(module: Any, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    y = module(x).detach()
    for sampling in SAMPLINGS:
        reader = rows_for(module, sampling)
        assert reader is not None
        rows = reader.gradients(y).shape[-2]
        assert reader.sampled(y) == reader.inputs(x).shape[-2] == rows, sampling
        assert sampling.rows is None or rows <= sampling.rows


def test_a_tracer_neither_sees_nor_leaves_a_kept_choice() -> None:
    real = spread(1234, 56)
    with FakeTensorMode():
        assert isinstance(spread(1234, 56), FakeTensor)
        assert isinstance(spread(4321, 56), FakeTensor)
    assert type(spread(4321, 56)) is Tensor
    assert torch.equal(spread(1234, 56), real)
