"""Numbers in fewer bits: how far they are from what they stand for."""

import pytest
import torch

from gomuon.functional.narrow import BLOCK, LARGEST, blocks_of, from_codes, to_bfloat16, to_codes


@pytest.mark.parametrize("shape", [(1, 1), (3, 5, 7), (2, BLOCK), (2, 16, 24), (1, BLOCK + 1)])
@pytest.mark.parametrize("size", [1.0, 1e-30, 1e30])
def test_codes_are_within_half_a_step(shape: tuple[int, ...], size: float) -> None:
    X = size * torch.randn(shape, generator=torch.Generator().manual_seed(0))
    codes, scales = to_codes(X)
    assert (codes.dtype, codes.shape) == (torch.int8, X.shape)
    assert scales.shape == (len(X), blocks_of(X[0].numel()))
    again = from_codes(codes, scales, torch.float64)
    for row, one, scale in zip(X.flatten(1), again.flatten(1), scales, strict=True):
        for block, back, s in zip(row.split(BLOCK), one.split(BLOCK), scale, strict=True):
            assert float(s) == pytest.approx(float(block.abs().max()) / LARGEST**2)
            half_steps = (block.double().abs() * s.double()).sqrt() + s / 4
            assert ((block - back).abs() <= 1.001 * half_steps).all()
            assert float((block - back).abs().max()) <= float(block.abs().max()) / LARGEST


def test_small_elements_beside_a_large_one_keep_digits() -> None:
    """With equal steps all of them would be zero."""
    X = torch.full((1, BLOCK), 1e-3)
    X[0, 0] = 1.0
    again = from_codes(*to_codes(X), torch.float32)
    torch.testing.assert_close(again, X, rtol=0.1, atol=0)


def test_zeros_and_the_smallest_numbers_are_kept_finite() -> None:
    X = torch.zeros(3, BLOCK)
    X[1], X[2, 0] = 1e-45, 1.5e-43
    codes, scales = to_codes(X)
    again = from_codes(codes, scales, torch.float32)
    assert again.isfinite().all()
    assert not again[0].any()
    assert float((again - X).abs().max()) <= 1.5e-43


def test_what_is_not_finite_stays_so() -> None:
    X = torch.ones(3, 2 * BLOCK)
    X[0, 5], X[1, 5] = torch.nan, torch.inf
    again = from_codes(*to_codes(X), torch.float32)
    assert again[:2, :BLOCK].isnan().all()
    torch.testing.assert_close(again[:2, BLOCK:], X[:2, BLOCK:])
    torch.testing.assert_close(again[2], X[2])


def test_bfloat16_is_one_of_the_two_neighbours_and_symmetric() -> None:
    X = torch.randn(9, 9, generator=torch.Generator().manual_seed(0))
    X = X + X.mT
    rounded = [to_bfloat16(X, turn) for turn in range(500)]
    for one in rounded:
        assert torch.equal(one, one.mT)
        assert ((one.float() - X).abs() <= 2**-7 * X.abs()).all()
        assert torch.equal(to_bfloat16(one, 3), one), "what is rounded is not rounded again"
    mean = torch.stack(rounded).double().mean(0)
    nearest = (X.bfloat16().double() - X).abs().max()
    assert float((mean - X).abs().max()) < 0.05 * float(nearest)


def test_bfloat16_keeps_what_is_not_finite() -> None:
    X = torch.tensor([torch.nan, torch.inf, -torch.inf])
    assert str(to_bfloat16(X, 1)) == str(X.bfloat16())


def test_a_slow_average_goes_on() -> None:
    """To the nearest it stops where it began: measured .66 and .007 off."""
    exact, turning, nearest = torch.ones(8, 8), torch.ones(8, 8), torch.ones(8, 8)
    for turn in range(3000):
        exact = exact.lerp(torch.full((8, 8), 3.0), 0.001)
        turning = to_bfloat16(turning.lerp(torch.full((8, 8), 3.0), 0.001), turn).float()
        nearest = nearest.lerp(torch.full((8, 8), 3.0), 0.001).bfloat16().float()
    assert float((nearest / exact - 1).abs().max()) > 0.5
    assert float((turning / exact - 1).abs().max()) < 0.02
