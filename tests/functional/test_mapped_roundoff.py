"""Maps amplify the source's own roundoff; what they make of it is no direction."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gomuon.functional import linalg
from gomuon.functional.mapped_roundoff import MappedRoundoff, norm_bound, null_below
from gomuon.functional.oracle import inside_only_direction, matched_direction
from gomuon.functional.polar_factor import PolarMethod
from gomuon.functional.spectra import mapped_norm_and_rank
from tests.functional.matrices import orthogonal, random_source

RANK = 20


@pytest.fixture
def branch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "accelerator":
        monkeypatch.setattr(linalg, "decomposes_well", lambda device: False)
    return str(request.param)


def amplified(m: int, n: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """A source of rank 20 [m, n] and maps that are 30 times as large where it has nothing."""
    source = random_source(seed)
    U, V = orthogonal(m, source), orthogonal(n, source)
    sigma = torch.logspace(0, -1, RANK, dtype=torch.float64)
    M = (U[:, :RANK] * sigma) @ V[:, :RANK].T
    left, right = (
        (basis * torch.where(torch.arange(len(basis)) < RANK, 1.0, 30.0)) @ basis.T
        for basis in (U, V)
    )
    return M, left, right


def distance(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("branch", ["cpu", "accelerator"], indirect=True)
@pytest.mark.parametrize("shape", [(40, 40), (64, 32), (32, 64)])
@pytest.mark.parametrize("method", ["exact", "canonical"])
def test_amplified_roundoff_is_left_alone(
    branch: str, shape: tuple[int, int], method: PolarMethod
) -> None:
    M, left, right = amplified(*shape)
    wanted, _ = matched_direction(M, left, right, polar_method="canonical")  # in float64
    maps = left.float(), right.float()
    C = maps[0] @ M.float() @ maps[1]
    sigma = torch.linalg.svdvals(C.double())
    assert sigma[RANK] > null_below(torch.float32) * sigma[0]  # C alone does not tell
    found, rank = matched_direction(M.float(), *maps, polar_method=method)
    assert int(rank) == RANK
    assert distance(found, wanted) < 5e-3  # the maps amplify 900 times what float32 rounds away
    completed, _ = matched_direction(M.float(), *maps, polar_method="svd")
    assert distance(completed, wanted) > 1  # what the maps make of such noise is large
    inside = inside_only_direction(M.float(), *maps, polar_method=method)
    assert int(inside.square().sum().round()) == RANK
    assert (
        int(mapped_norm_and_rank(C[None], M.float()[None], maps[0][None], maps[1][None])[1]) == RANK
    )


def test_a_weak_direction_that_no_map_amplifies_is_kept() -> None:
    """Roundoff is compared along each direction, not by the largest that maps could make of it."""
    diagonal, left, right = torch.ones(30), torch.ones(30), torch.ones(30)
    left[0] = right[1] = 30.0  # large maps elsewhere, and of different directions
    diagonal[-1] = 1e-3
    M, P_B, P_A = torch.diag(diagonal), torch.diag(left), torch.diag(right)
    roundoff = MappedRoundoff(M[None], P_B[None], P_A[None])
    assert float(roundoff.bound()) > 1e-3
    D, rank = matched_direction(M, P_B, P_A, polar_method="exact")
    assert int(rank) == 30
    assert float(D[-1, -1]) == pytest.approx(1.0, abs=1e-4)


def test_bounds_are_bounds() -> None:
    generator = torch.Generator().manual_seed(1)
    M = torch.randn(3, 12, 20, generator=generator)
    maps = []
    for d in (12, 20):
        X = torch.randn(3, d, 2 * d, generator=generator)
        maps.append(X @ X.mT / d)
    norms = [torch.linalg.matrix_norm(X, ord=2) for X in (M, *maps)]
    roundoff = MappedRoundoff(M, *maps)
    largest = null_below(torch.float32) * norms[0] * norms[1] * norms[2]
    assert bool((roundoff.bound() >= largest).all())
    assert bool((roundoff.bound() <= 3 * largest).all())
    assert bool((roundoff.rough_bound() >= largest).all())
    U = torch.linalg.qr(torch.randn(3, 12, 12, generator=generator)).Q
    V = torch.linalg.qr(torch.randn(3, 20, 12, generator=generator)).Q
    along = roundoff.along(U, V)
    assert bool((along <= roundoff.bound()[:, None]).all())
    N = torch.randn(3, 12, 20, generator=generator)
    length = null_below(torch.float32) * norm_bound(M)
    N *= (length / torch.linalg.matrix_norm(N, ord=2))[:, None, None]
    mapped = (U.mT @ (maps[0] @ N @ maps[1]) @ V).diagonal(dim1=-2, dim2=-1).abs()
    assert bool((mapped <= along).all())
    turned = roundoff.mT.along(V, U)
    torch.testing.assert_close(turned, along)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_the_bound_of_a_norm_is_near_it(scale: float) -> None:
    X = torch.randn(5, 24, 16, generator=torch.Generator().manual_seed(2)) * scale
    exact = torch.linalg.matrix_norm(X.double(), ord=2)
    found = norm_bound(X).double()
    assert bool((found >= exact * (1 - 1e-6)).all())
    assert bool((found <= exact * 16 ** (1 / 8)).all())


def test_maps_in_every_form_give_the_same_directions() -> None:
    """Blocks and diagonals amplify roundoff as their whole matrices do."""
    M = torch.zeros(1, 8, 8)
    M[0, :5, :5] = torch.randn(5, 5, generator=torch.Generator().manual_seed(3))
    M[0, 5:, 5:] = 1e-6  # as roundoff would leave it
    scale = torch.ones(8)
    scale[5:] = 30.0
    whole = torch.diag(scale)[None]
    blocks = torch.stack([torch.diag(scale[:4]), torch.diag(scale[4:])])[None]
    wanted, rank = matched_direction(M, whole, whole, polar_method="exact")
    assert int(rank) == 5
    for left, right in ((blocks, blocks), (scale[None, :, None], scale[None, None, :])):
        found, rank = matched_direction(M, left, right, polar_method="exact")
        assert int(rank) == 5
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
