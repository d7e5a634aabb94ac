"""Roots of many factors: in pieces, read together, and decomposed where products fail."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from gomuon.functional import factors
from gomuon.functional.factors import (
    Root,
    RootBatch,
    decomposed_root,
    read_roots,
    start_roots,
    store_roots,
    take_roots,
)
from gomuon.functional.product_roots import product_root
from tests.functional.matrices import distance, normal, random_source


def grams(count: int, d: int) -> Tensor:
    X = normal(count * d, 2 * d, random_source(count + d)).view(count, d, 2 * d)
    return X @ X.mT


def nowhere(batch: RootBatch) -> list[Any]:
    return []


def made(S: Any, root: Root, **fields: Any) -> RootBatch:
    return RootBatch(S, root, nowhere, **fields)


def test_pieces_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    S = grams(6, 5).view(3, 2, 5, 5)
    whole = made(S, Root.of(0.25))
    whole.multiply()
    monkeypatch.setattr(factors, "_AT_ONCE", 2 * 5 * 5)
    pieces = made(list(S), Root.of(0.25))
    pieces.multiply()
    assert whole.products is not None
    assert pieces.products is not None
    assert pieces.products[1].tolist() == 3 * [factors._FINE]
    assert pieces.products[0].shape == S.shape
    assert distance(pieces.products[0], whole.products[0]) < 1e-12


def test_everything_is_read_together() -> None:
    bad = grams(3, 3)
    bad[1] = -bad[1]
    bad[2, 0, 0] = torch.inf
    batches = [made(bad, Root.of(0.5)), made([grams(1, 4)], Root.of(0.25))]
    start_roots(batches, "products")
    more = read_roots(batches, torch.tensor([0, 2, 1]), torch.tensor([True]))
    assert more == [[0, 2, 1], [1]]
    fine, diverged, not_finite = factors._FINE, factors._DIVERGED, factors._NOT_FINITE
    assert [list(batch.outcomes) for batch in batches] == [[fine, diverged, not_finite], [fine]]


def test_what_fails_is_decomposed_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    S = grams(3, 4)
    S[1] -= 10 * torch.eye(4)  # not semi-definite
    S[2, 0, 0] = torch.nan
    calls: list[Tensor] = []

    def counted(S: Tensor, **settings: float) -> Tensor:
        calls.append(S)
        return decomposed_root(S, **settings)

    batch = made(S, Root(partial(counted, power=0.25), partial(product_root, power=0.25)))
    start_roots([batch], "products")
    read_roots([batch])
    first, second, third = (batch.result(index) for index in range(3))
    assert first[0] is not None
    assert distance(first[0], decomposed_root(S[0], 0.25)) < 1e-8
    assert not first[1]
    assert second[0] is not None
    assert torch.equal(second[0], decomposed_root(S[1:2], 0.25)[0])
    assert second[1]
    assert third == (None, False)
    assert len(calls) == 1, "what is not finite is not decomposed either"


def test_what_is_not_trusted_can_be_replaced_without_reading() -> None:
    S = grams(2, 3)
    S[1] = -S[1]
    batch = made(S, Root.of(0.5))
    start_roots([batch], "products")
    instead = torch.full_like(S, 7.0)
    found = batch.roots_or(instead)
    assert torch.equal(found[1], instead[1])
    assert distance(found[0], decomposed_root(S[0], 0.5)) < 1e-8


def test_without_a_form_by_products_everything_is_decomposed() -> None:
    sizes: list[int] = []

    def seen(batch: RootBatch) -> list[str]:
        sizes.append(batch.first.shape[-1])
        assert all(batch.result(index)[0] is not None for index in range(2))
        return [f"of side {sizes[-1]}"]

    root = Root(partial(decomposed_root, power=0.25))
    batches = [RootBatch(grams(2, d), root, seen) for d in (3, 5)]
    assert read_roots(batches) == []
    assert take_roots(batches, "products") == ["of side 5", "of side 3"]  # the largest first
    assert all(not batch.decomposed for batch in batches), "results are dropped once they are used"


def test_products_are_stored_before_anything_is_decomposed() -> None:
    order: list[str] = []

    def noted(name: str, batch: RootBatch) -> list[Any]:
        order.append(name)
        return []

    decomposed = RootBatch(
        grams(1, 9), Root(partial(decomposed_root, power=0.5)), partial(noted, "eigh")
    )
    multiplied = RootBatch(grams(1, 3), Root.of(0.5), partial(noted, "products"))
    start_roots([decomposed, multiplied], "products")
    read_roots([decomposed, multiplied])
    store_roots([decomposed, multiplied])
    assert order == ["products", "eigh"]


def test_factors_are_prepared_first() -> None:
    S = grams(2, 3)
    plain = made(S + torch.eye(3), Root.of(0.5))
    prepared = made(S, Root.of(0.5), prepared=lambda X: X + torch.eye(3))
    for batch in (plain, prepared):
        batch.multiply()
    assert plain.products is not None
    assert prepared.products is not None
    assert torch.equal(plain.products[0], prepared.products[0])
    found = zip(plain.decompose(), prepared.decompose(), strict=True)
    assert all(x is not None and y is not None and torch.equal(x, y) for x, y in found)


def test_the_products_are_those_of_product_root() -> None:
    S = grams(4, 6).float()
    batch = made(S, Root.of(0.25, max_condition=50.0))
    batch.multiply()
    assert batch.products is not None
    expected, _ = product_root(S, 0.25, 1 / 49)
    assert distance(batch.products[0], expected) < 1e-5
