"""Measured certificates are what `gomuon.functional.theory` defines, for maps of every form."""

from itertools import product

import pytest
import torch
from torch import Tensor

from gomuon.functional import frobenius_graft, theory, weighted_norm
from gomuon.functional.block_diagonal import diagonal_blocks, whole_matrix
from gomuon.functional.certificates import (
    Maps,
    cached_efficiency,
    distortion,
    effective_rank,
    map_spectrum,
    oracle_share,
)
from gomuon.functional.factors import decomposed_root
from gomuon.functional.oracle import matched_direction
from tests.accelerator import host_as_accelerator

M_SIDE, N_SIDE, BATCH = 10, 13, 2
KINDS = ("whole", "blocks", "padded", "diagonal")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def drawn(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def a_map(kind: str, d: int, side: int, seed: int) -> Tensor:
    """A quarter root in this form."""
    X = drawn(seed, BATCH, d, 3 * d)
    S = X @ X.mT / (3 * d) + 0.05 * torch.eye(d).double()
    if kind == "diagonal":
        diagonal = S.diagonal(dim1=-2, dim2=-1)
        return decomposed_root(diagonal.unsqueeze(-2 if side else -1), 0.25)
    if kind != "whole":
        S = diagonal_blocks(S, {"blocks": {10: 2, 13: 13}[d], "padded": 3}[kind])
    return decomposed_root(S, 0.25)


def some_maps(left: str, right: str, seed: int) -> tuple[Tensor, Tensor]:
    return a_map(left, M_SIDE, 0, seed), a_map(right, N_SIDE, 1, seed + 1)


def whole(P: Tensor, d: int) -> Tensor:
    return whole_matrix(P, d)


@DTYPES
@pytest.mark.parametrize(("left", "right"), list(product(KINDS, KINDS)))
def test_the_certificates_are_their_definitions(left: str, right: str, dtype: torch.dtype) -> None:
    if dtype == torch.float32:
        with host_as_accelerator():
            check_certificates(left, right, dtype, 5e-3)
    else:
        check_certificates(left, right, dtype, 1e-3)  # ‖X‖_op is estimated to .1 %


def check_certificates(left: str, right: str, dtype: torch.dtype, rtol: float) -> None:
    maps, cached = some_maps(left, right, 0), some_maps(left, right, 10)
    M = drawn(20, BATCH, M_SIDE, N_SIDE)
    D, _ = matched_direction(M, *maps)
    D = frobenius_graft(D)
    W = [whole(P, d) for P, d in zip(maps, (M_SIDE, N_SIDE), strict=True)]
    W_cached = [whole(P, d) for P, d in zip(cached, (M_SIDE, N_SIDE), strict=True)]
    spectra = [map_spectrum(P.to(dtype), 0.25) for P in maps]
    inverses: Maps = (spectra[0].inverse, spectra[1].inverse)
    used: Maps = (maps[0].to(dtype), maps[1].to(dtype))

    def close(found: Tensor, exact: Tensor) -> None:
        torch.testing.assert_close(found.double(), exact, rtol=rtol, atol=0.0)

    for S, P in zip(spectra, W, strict=True):
        close(S.condition, theory.condition_number(P))
        assert S.raised.sum() == 0
    share = oracle_share(M.to(dtype), D.to(dtype), used, inverses)
    close(share.value, theory.oracle_value(M, *W))
    close(share.radius, weighted_norm(D, *W))
    assert share.rank.tolist() == [M_SIDE] * BATCH
    # Theorem 1: the gap is zero.
    close(share.value * share.radius, (M * D).sum(dim=(-2, -1)))
    theta = distortion(spectra[0].inverse, cached[0].to(dtype), M_SIDE) * distortion(
        spectra[1].inverse, cached[1].to(dtype), N_SIDE
    )
    close(theta, 1 / theory.cached_efficiency_bound(*W, *W_cached))
    old: Maps = (cached[0].to(dtype), cached[1].to(dtype))
    reached = cached_efficiency(M.to(dtype), old, inverses, share.value, "exact")
    D_cached, _ = matched_direction(M, *cached)
    exact = (M * D_cached).sum(dim=(-2, -1)) / (
        weighted_norm(D_cached, *W) * theory.oracle_value(M, *W)
    )
    close(reached, exact)
    assert torch.all(reached >= (1 - 2 * rtol) / theta)  # Proposition 7
    close(
        effective_rank(M.to(dtype)),
        torch.linalg.matrix_norm(M, ord="nuc").square() / M.square().sum((-2, -1)),
    )


@pytest.mark.parametrize("lost", [1, 4])
def test_eigenvalues_that_the_floor_raised_are_counted(lost: int) -> None:
    values = torch.ones(12)
    values[:lost] = 0.0
    Q = torch.linalg.qr(drawn(0, 12, 12)).Q.float()
    S = (Q * values) @ Q.mT
    P = decomposed_root((S + S.mT)[None] / 2, 0.25)
    assert map_spectrum(P, 0.25).raised.tolist() == [lost]
    diagonal = decomposed_root(values.view(1, -1, 1), 0.25)
    assert map_spectrum(diagonal, 0.25).raised.tolist() == [lost]
    with host_as_accelerator():
        assert map_spectrum(P, 0.25).raised.tolist() == [lost]
