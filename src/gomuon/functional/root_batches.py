"""Inverse roots of many factors at once, checked, with one wait for the device."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

import torch
from torch import Tensor

from gomuon.functional.inverse_roots import (
    RootMethod,
    decomposed_root,
    shift_of,
    takes_products,
)
from gomuon.functional.linalg import full_float32, guarded, over_batch
from gomuon.functional.product_roots import product_root
from gomuon.threads.spreading import concurrently


@dataclass(frozen=True)
class Root:
    """What is made of each factor S, in two forms.

    Attributes:
        decomposed: of a batch, by decomposition.
        multiplied: the same by products, and which results can be trusted; see `product_root`. None
            if there is no such form.
    """

    decomposed: Callable[[Tensor], Tensor]
    multiplied: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None

    @classmethod
    def of(cls, power: float, max_condition: float | None = None) -> "Root":
        """The inverse root with this power."""
        shift = shift_of(max_condition)
        return cls(
            partial(decomposed_root, power=power, shift=shift),
            partial(product_root, power=power, shift=shift),
        )


@dataclass
class RootBatch:
    """Factors of one shape, what is wanted of each, and what was found.

    Attributes:
        factors: [b, ..., d, d], or b tensors [..., d, d].
        root: what is wanted.
        prepared: what is done to all factors first, for example damping.
        products: roots by products like `factors`, and which of them can be trusted, [b].
        trusted: the same, read.
        decomposed: roots by decomposition, one for each factor, None where it failed.
    """

    factors: Tensor | Sequence[Tensor]
    root: Root
    prepared: Callable[[Tensor], Tensor] = lambda S: S
    products: tuple[Tensor, Tensor] | None = field(default=None, init=False)
    trusted: Sequence[int] = field(default=(), init=False)
    decomposed: Sequence[Tensor | None] = field(default=(), init=False)

    @property
    def first(self) -> Tensor:
        """A factor, or all of them: for what they have in common."""
        return self.factors if isinstance(self.factors, Tensor) else self.factors[0]

    def multiply(self) -> None:
        """Take the roots by products. Nothing waits for them."""
        assert self.root.multiplied is not None
        S = self._stacked(self.factors)
        flat = S.flatten(0, -3)
        pieces = [
            over_batch(self.root.multiplied, piece)
            for piece in flat.split(max(1, _AT_ONCE // S.shape[-1] ** 2))
        ]
        roots, fine = (torch.cat(parts) for parts in zip(*pieces, strict=True))
        self.products = roots.view_as(S), fine.view(len(S), -1).all(1)

    def decompose(self) -> list[Tensor | None]:
        return guarded(self.root.decomposed, self._stacked(self.factors))

    def found(self, index: int) -> Tensor | None:
        """The root of one factor; None if there is none that can be trusted."""
        if self.products is None:
            return self.decomposed[index]
        return self.products[0][index] if self.trusted[index] else None

    def result(self, index: int) -> tuple[Tensor | None, bool]:
        """The root of one factor, and whether it was decomposed because products failed.

        None if it cannot be computed, or the factor or the root is not finite.
        """
        found = self.found(index)
        if found is not None or self.products is None:
            return found, False
        alone = self._stacked(self.factors[index : index + 1])
        found = guarded(self.root.decomposed, alone)[0]
        return found, found is not None

    def _stacked(self, factors: Tensor | Sequence[Tensor]) -> Tensor:
        return self.prepared(factors if isinstance(factors, Tensor) else torch.stack(list(factors)))


_AT_ONCE = 2**25  # largest number of elements that are multiplied at a time


def start_roots(batches: Sequence[RootBatch], method: RootMethod) -> None:
    """Start what is to be taken by products. Nothing waits for the device."""
    multiplied = [
        batch
        for batch in batches
        if batch.root.multiplied is not None and takes_products(method, batch.first.device)
    ]
    if multiplied:
        with full_float32():
            for batch in multiplied:
                batch.multiply()


def read_roots(batches: Sequence[RootBatch], *more: Tensor) -> list[list[int]]:
    """Read which roots by products can be trusted, and `more` flags. Waits for the device once."""
    unread = [(batch, batch.products[1]) for batch in batches if batch.products is not None]
    flags = [*more, *(fine for _, fine in unread)]
    if not flags:
        return []
    device = flags[0].device
    numbers = iter(torch.cat([flag.to(device, torch.int8) for flag in flags]).tolist())
    lists = [list(islice(numbers, len(flag))) for flag in flags]
    for (batch, _), trusted in zip(unread, lists[len(more) :], strict=True):
        batch.trusted = trusted
    return lists[: len(more)]


def finished_roots(batches: Sequence[RootBatch]) -> Iterator[RootBatch]:
    """Every batch with its results: those by products first, then the others, the largest first."""
    yield from (batch for batch in batches if batch.products is not None)
    decomposed = [batch for batch in batches if batch.products is None]
    decomposed.sort(key=lambda batch: -batch.first.shape[-1])
    found = concurrently([batch.decompose for batch in decomposed])
    for batch, results in zip(decomposed, found, strict=True):
        batch.decomposed = results
        yield batch
        batch.decomposed = ()  # so that not all results are in memory at a time
