"""Roots of many factors: in pieces, read together, and decomposed where products fail."""

from functools import partial

import pytest
import torch
from torch import Tensor

from gomuon.functional import root_batches
from gomuon.functional.inverse_roots import decomposed_root
from gomuon.functional.product_roots import product_root
from gomuon.functional.root_batches import (
    Root,
    RootBatch,
    finished_roots,
    read_roots,
    start_roots,
)
from tests.functional.matrices import distance, normal, random_source


def grams(count: int, d: int) -> Tensor:
    X = normal(count * d, 2 * d, random_source(count + d)).view(count, d, 2 * d)
    return X @ X.mT


def test_pieces_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    S = grams(6, 5).view(3, 2, 5, 5)
    whole = RootBatch(S, Root.of(0.25))
    whole.multiply()
    monkeypatch.setattr(root_batches, "_AT_ONCE", 2 * 5 * 5)
    pieces = RootBatch(list(S), Root.of(0.25))
    pieces.multiply()
    assert whole.products is not None
    assert pieces.products is not None
    assert pieces.products[1].tolist() == [True, True, True]
    assert pieces.products[0].shape == S.shape
    assert distance(pieces.products[0], whole.products[0]) < 1e-12


def test_everything_is_read_together() -> None:
    bad = grams(2, 3)
    bad[1] = -bad[1]
    batches = [RootBatch(bad, Root.of(0.5)), RootBatch([grams(1, 4)], Root.of(0.25))]
    start_roots(batches, "products")
    more = read_roots(batches, torch.tensor([0, 2, 1]), torch.tensor([True]))
    assert more == [[0, 2, 1], [1]]
    assert [list(batch.trusted) for batch in batches] == [[1, 0], [1]]


def test_what_fails_is_decomposed_and_said() -> None:
    S = grams(3, 4)
    S[1] -= 10 * torch.eye(4)  # not semi-definite
    S[2, 0, 0] = torch.nan
    batch = RootBatch(S, Root.of(0.25))
    start_roots([batch], "products")
    read_roots([batch])
    (done,) = finished_roots([batch])
    first, second, third = (done.result(index) for index in range(3))
    assert first[0] is not None
    assert distance(first[0], decomposed_root(S[0], 0.25)) < 1e-8
    assert not first[1]
    assert second[0] is not None
    assert torch.equal(second[0], decomposed_root(S[1:2], 0.25)[0])
    assert second[1]
    assert third == (None, False)


def test_without_a_form_by_products_everything_is_decomposed() -> None:
    batches = [RootBatch(grams(2, d), Root(partial(decomposed_root, power=0.25))) for d in (3, 5)]
    start_roots(batches, "products")
    assert read_roots(batches) == []
    sizes = []
    for batch in finished_roots(batches):
        sizes.append(batch.first.shape[-1])
        assert all(batch.result(index)[0] is not None for index in range(2))
    assert sizes == [5, 3]  # the largest first
    assert all(not batch.decomposed for batch in batches), "results are dropped once they are used"


def test_factors_are_prepared_first() -> None:
    S = grams(2, 3)
    plain = RootBatch(S + torch.eye(3), Root.of(0.5))
    prepared = RootBatch(S, Root.of(0.5), lambda X: X + torch.eye(3))
    for batch in (plain, prepared):
        batch.multiply()
    assert plain.products is not None
    assert prepared.products is not None
    assert torch.equal(plain.products[0], prepared.products[0])
    made = zip(plain.decompose(), prepared.decompose(), strict=True)
    assert all(x is not None and y is not None and torch.equal(x, y) for x, y in made)


def test_the_products_are_those_of_product_root() -> None:
    S = grams(4, 6).float()
    batch = RootBatch(S, Root.of(0.25, max_condition=50.0))
    batch.multiply()
    assert batch.products is not None
    expected, _ = product_root(S, 0.25, 1 / 49)
    assert distance(batch.products[0], expected) < 1e-5
