"""A symmetric matrix survives being packed as a triangle, bit for bit."""

import pytest
import torch

from gomuon.functional.triangles import packed, packed_size, unpacked


@pytest.mark.parametrize("d", [1, 2, 3, 4, 7, 10])
@pytest.mark.parametrize("batch", [(), (1,), (2, 3)])
def test_half_the_numbers_give_the_matrix_back(d: int, batch: tuple[int, ...]) -> None:
    S = torch.randn(*batch, d, d, dtype=torch.float64)
    S = S + S.mT
    numbers = packed(S)
    assert numbers.shape == (torch.Size(batch).numel() * d * (d + 1) // 2,)
    assert packed_size(S.shape) == numbers.numel()
    assert torch.equal(unpacked(numbers, tuple(S.shape)), S)


@pytest.mark.parametrize("shape", [(3, 5, 1), (3, 1, 5)])
def test_a_diagonal_is_sent_as_it_is(shape: tuple[int, ...]) -> None:
    D = torch.randn(shape)
    assert packed_size(shape) == packed(D).numel() == 15
    assert torch.equal(unpacked(packed(D), shape), D)


def test_what_is_not_finite_stays_in_its_place() -> None:
    S = torch.eye(5)
    S[4, 1] = S[1, 4] = torch.nan
    S[3, 3] = torch.inf
    found = unpacked(packed(S), (5, 5))
    assert torch.equal(found.isnan(), S.isnan())
    assert torch.equal(found.isinf(), S.isinf())


def test_sums_of_triangles_are_triangles_of_sums() -> None:
    """Ranks add up what is packed."""
    S, T = (torch.randn(2, 6, 6, dtype=torch.float64) for _ in range(2))
    S, T = S + S.mT, T + T.mT
    assert torch.equal(unpacked(packed(S) + packed(T), (2, 6, 6)), S + T)
