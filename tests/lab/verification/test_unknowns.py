"""Whatever the numbers are, the unknowns are of their kind."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gomuon.lab.verification.unknowns import (
    Between,
    Distribution,
    FactorMatrix,
    Fixed,
    Numbers,
    PositiveDefinite,
    Rotation,
    SourceMatrix,
    Unknown,
    Whole,
    made_of,
    start_of,
)

UNKNOWNS: tuple[Unknown, ...] = (
    Numbers((2, 3)),
    Rotation(3),
    FactorMatrix(4, decades=3.0),
    SourceMatrix(4, 3),
    SourceMatrix(3, 5, rank=2, decades=2.0),
    Distribution(5),
    Between(-2, 7),
    Whole(16),
    Fixed(),
)


def numbers(size: int) -> list[Tensor]:
    normal = torch.randn(50, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return [normal, 1e3 * normal, 1e-3 * normal]


@pytest.mark.parametrize("unknown", UNKNOWNS, ids=str)
@pytest.mark.parametrize("simple", [False, True])
def test_starts_have_the_numbers_of_their_unknown(unknown: Unknown, simple: bool) -> None:
    drawn = numbers(unknown.size)[0]
    start = unknown.start(drawn, torch.full((50,), simple))
    assert start.shape == (50, unknown.size)
    assert start.isfinite().all()


def test_rotations_are_orthogonal() -> None:
    for drawn in numbers(9):
        Q = Rotation(3).made(drawn)
        assert torch.allclose(Q @ Q.mT, torch.eye(3, dtype=Q.dtype).expand_as(Q), atol=1e-13)


def test_factors_are_positive_definite_within_their_decades() -> None:
    factor = FactorMatrix(4, decades=3.0)
    for drawn in numbers(factor.size):
        S: PositiveDefinite = factor.made(drawn)
        eigenvalues = torch.linalg.eigvalsh(S.power(1))
        assert (eigenvalues > 0).all()
        ratio = eigenvalues[:, -1] / eigenvalues[:, 0]
        assert (ratio <= 1e3 * (1 + 1e-9)).all()
        torch.testing.assert_close(S.condition, ratio, rtol=1e-9, atol=0)
        torch.testing.assert_close(S.norm, eigenvalues[:, -1])
        product = S.power(-0.5) @ S.power(1) @ S.power(-0.5)
        assert (product - torch.eye(4, dtype=product.dtype)).abs().max() < 1e-10


@pytest.mark.parametrize(("m", "n", "rank"), [(4, 3, None), (3, 5, 2), (2, 2, 1)])
def test_sources_have_their_rank(m: int, n: int, rank: int | None) -> None:
    source = SourceMatrix(m, n, rank, decades=2.0)
    for drawn in numbers(source.size):
        M = source.made(drawn)
        assert M.shape == (50, m, n)
        sigma = torch.linalg.svdvals(M)
        k = min(m, n) if rank is None else rank
        assert (sigma[:, :k] > 0.09).all()
        assert (sigma[:, k:] < 1e-13).all()


def test_distributions_and_numbers_stay_in_their_range() -> None:
    for drawn in numbers(5):
        p = Distribution(5).made(drawn)
        assert (p >= 0).all()
        torch.testing.assert_close(p.sum(-1), torch.ones(50, dtype=p.dtype))
    for drawn in numbers(1):
        between = Between(-2, 7).made(drawn)
        assert ((between >= -2) & (between <= 7)).all()
        whole = Whole(16).made(drawn)
        assert ((whole >= 1) & (whole <= 16) & (whole == whole.round())).all()
    every = {int(x) for x in Whole(16).made(torch.linspace(-1, 1, 2000)[:, None])}
    assert every == set(range(1, 17))


def test_simple_starts_are_nearly_diagonal() -> None:
    drawn = numbers(9)[0]
    Q = Rotation(3).made(Rotation(3).start(drawn, torch.ones(50, dtype=torch.bool)))
    off = Q - torch.diag_embed(Q.diagonal(dim1=-2, dim2=-1))
    assert off.abs().max() < 0.1


def test_several_unknowns_share_one_point() -> None:
    parts = (Distribution(3), Fixed(), Numbers((2,)))
    drawn = numbers(5)[0]
    start = start_of(parts, drawn, torch.zeros(50, dtype=torch.bool))
    p, point, X = made_of(parts, start)
    assert p.shape == (50, 3)
    assert point.shape == (50, 0)
    assert torch.equal(X, drawn[:, 3:])
