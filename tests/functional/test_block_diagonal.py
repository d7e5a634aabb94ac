"""Block-diagonal and diagonal maps are what the explicit d × d matrices are."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gomuon.functional.block_diagonal import (
    block_moments,
    diagonal_blocks,
    diagonal_moments,
    diagonal_of,
    fill_padding_,
    left_product,
    right_product,
    squared,
    whole_matrix,
)
from gomuon.functional.factors import inverse_root
from gomuon.functional.linalg import identity_like, trace_mean
from gomuon.functional.oracle import matched_direction, preconditioned
from tests.functional.matrices import repeatable

B = 3  # matrices of a batch


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def definite(*leading: int, d: int, seed: int = 0) -> Tensor:
    rows = random(*leading, 2 * d, d, seed=seed)
    return rows.mT @ rows / (2 * d)


def explicit(P: Tensor, d: int) -> Tensor:
    """[b, d, d], piece by piece."""
    whole = P.new_zeros(len(P), d, d)
    for matrix, part in zip(whole, P, strict=True):
        if part.ndim == 2:
            matrix.copy_(part if part.shape[0] == part.shape[1] else torch.diag(part.flatten()))
            continue
        size = part.shape[-1]
        for number, block in enumerate(part):
            begin, end = number * size, min((number + 1) * size, d)
            matrix[begin:end, begin:end] = block[: end - begin, : end - begin]
    return whole


def maps(d: int, where: str) -> dict[str, Tensor]:
    """A map of a side of length d in every form."""
    diagonal = random(B, d, seed=5).abs() + 0.1
    return {
        "whole": definite(B, d=d),
        "equal": definite(B, 2, d=d // 2),
        "padded": diagonal_blocks(definite(B, d=d), 3),
        "numbers": definite(B, d, d=1),
        "diagonal": diagonal.unsqueeze(-1 if where == "left" else -2),
    }


FORMS = ["whole", "equal", "padded", "numbers", "diagonal"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("d", [4, 8, 10])
def test_products(form: str, d: int) -> None:
    P = maps(d, "left")[form]
    X = random(B, d, 5)
    torch.testing.assert_close(left_product(P, X), explicit(P, d) @ X)
    torch.testing.assert_close(explicit(squared(P), d), explicit(P, d) @ explicit(P, d))
    torch.testing.assert_close(diagonal_of(P, d), explicit(P, d).diagonal(dim1=-2, dim2=-1))
    P = maps(d, "right")[form]
    torch.testing.assert_close(right_product(X.mT, P), X.mT @ explicit(P, d))
    torch.testing.assert_close(whole_matrix(P, d), explicit(P, d))


@pytest.mark.parametrize("left", FORMS)
@pytest.mark.parametrize("right", FORMS)
def test_the_oracle_with_maps_of_any_form(left: str, right: str) -> None:
    m, n = 8, 10
    P_B, P_A, M = maps(m, "left")[left], maps(n, "right")[right], random(B, m, n)
    D, rank = matched_direction(M, P_B, P_A)
    expected, _ = matched_direction(M, explicit(P_B, m), explicit(P_A, n))
    torch.testing.assert_close(D, expected)
    assert torch.equal(rank, torch.full((B,), float(m), dtype=torch.float64))
    C = explicit(P_B, m) @ M @ explicit(P_A, n)
    torch.testing.assert_close(preconditioned(M, P_B, P_A), C)
    # Theorem 1: ⟨M, D₀⟩ = ‖P_B M P_A‖_*.
    value = torch.linalg.matrix_norm(C, ord="nuc")
    torch.testing.assert_close((M * D).sum(dim=(-2, -1)), value)


def test_a_batch_of_several_dimensions_has_a_map_for_each_matrix() -> None:
    P, M = definite(2, 3, 2, d=4), random(2, 3, 8, 5)
    D, _ = matched_direction(M, P, None)
    flat, _ = matched_direction(M.flatten(0, 1), P.flatten(0, 1), None)
    torch.testing.assert_close(D.flatten(0, 1), flat)


@repeatable
@given(st.integers(1, 40), st.integers(2, 6), st.integers(1, 3))
def test_moments_of_pieces_are_the_blocks_of_the_whole_moment(
    d: int, blocks: int, strips: int
) -> None:
    blocks = min(blocks, d)
    if (blocks - 1) * -(-d // blocks) >= d:
        return  # such a cut would have an empty piece
    rows = random(7, strips * d)
    whole = rows.mT @ rows
    found = block_moments(rows, strips, blocks)
    size = -(-d // blocks)
    grouped = block_moments(rows.view(7, strips, d).movedim(1, 0), strips, blocks)
    torch.testing.assert_close(found, grouped)
    found = found if blocks > 1 else found.unsqueeze(1)
    assert found.shape == (strips, blocks, size, size)
    for strip in range(strips):
        own = whole[strip * d : (strip + 1) * d, strip * d : (strip + 1) * d]
        for number, block in enumerate(found[strip]):
            piece = slice(number * size, min((number + 1) * size, d))
            length = piece.stop - piece.start
            torch.testing.assert_close(block[:length, :length], own[piece, piece])
            assert not block[length:].any()
            assert not block[:, length:].any()
    diagonal = diagonal_moments(rows, strips)
    torch.testing.assert_close(diagonal.flatten(), whole.diagonal())


def test_padding_changes_neither_mean_eigenvalues_nor_roots() -> None:
    d, size = 10, 4
    S = torch.zeros(1, 3, size, size, dtype=torch.float64)
    S[0, :2], S[0, 2, :2, :2] = definite(2, d=4), definite(1, d=2)[0]
    alone = S[0, 2, :2, :2].clone()
    fill_padding_(S, d)
    torch.testing.assert_close(trace_mean(S)[0, 2, 0, 0], alone.trace() / 2)
    shifted = S + 0.3 * trace_mean(S) * identity_like(S)  # damping keeps it so
    torch.testing.assert_close(trace_mean(shifted)[0, 2, 0, 0], 1.3 * alone.trace() / 2)
    root = inverse_root(S, 0.25)[0, 2]
    torch.testing.assert_close(root[:2, :2], inverse_root(alone, 0.25))
    assert root[:2, 2:].abs().max() < 1e-15


def test_a_whole_matrix_and_back() -> None:
    S = definite(2, d=10)
    for blocks in (2, 3, 5, 10):
        cut = diagonal_blocks(S, blocks)
        torch.testing.assert_close(diagonal_blocks(whole_matrix(cut, 10), blocks), cut)
        torch.testing.assert_close(diagonal_of(cut, 10), diagonal_of(S, 10))
        assert torch.linalg.eigvalsh(cut).min() > 0


def test_diagonals_have_roots_with_the_same_floor() -> None:
    values = torch.tensor([4.0, 1.0, 0.0, 1e-30], dtype=torch.float64)
    expected = inverse_root(torch.diag(values), 0.25).diagonal()
    for shape in ((1, 4, 1), (1, 1, 4)):
        S = values.view(shape)
        torch.testing.assert_close(inverse_root(S, 0.25), expected.view(shape))
        assert torch.equal(inverse_root(torch.zeros(shape), 0.25), torch.ones(shape))
