"""From a second moment to a map: OAS, Equations (17)–(18), and inverse roots, Equation (29)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor

from gomuon.functional import linalg
from gomuon.functional.linalg import (
    decompose,
    finite_factors,
    full_float32,
    guarded,
    is_diagonal,
    over_batch,
    symmetric_product,
)
from gomuon.functional.product_roots import product_root
from gomuon.threads.spreading import concurrently

RootMethod = Literal["eigh", "products", "auto"]

# ---- shrinkage -----------------------------------------------------------------------------------


def oas(S: Tensor, n: int | float | Tensor) -> tuple[Tensor, Tensor]:
    """OAS(S) and its intensity λ(S, n) for S [..., d, d] built from n samples.

    See `gomuon.functional.oas`.
    """
    d = S.shape[-1]
    # λ does not depend on the scale of S; dividing it out keeps the squares below in range.
    scale = _mean_eigenvalue(S)
    T = S / torch.where(scale > 0, scale, 1)[..., None, None]
    trace = T.diagonal(dim1=-2, dim2=-1).sum(-1)
    square = torch.linalg.matrix_norm(T).square()  # tr(S²) for symmetric S
    # tr(S²) − tr(S)²/d, written as ‖S − tr(S)/d·I‖² so that it cannot cancel below zero.
    dispersion = torch.linalg.matrix_norm(_plus_identity(T, -trace / d)).square()
    numerator = (1 - 2 / d) * square + trace.square()
    denominator = (n + 1 - 2 / d) * dispersion
    # Equation (17).
    intensity = torch.where(denominator > 0, numerator / denominator, 1.0).clamp(0, 1).to(S.dtype)
    return shrink(S, intensity), intensity  # (18)


def shrink(S: Tensor, intensity: float | Tensor) -> Tensor:
    """(1−λ)S + λ·tr(S)/d·I, Equation (18), for a given intensity λ."""
    weight = torch.as_tensor(intensity, dtype=S.dtype, device=S.device)
    return _plus_identity((1 - weight)[..., None, None] * S, weight * _mean_eigenvalue(S))


def _mean_eigenvalue(S: Tensor) -> Tensor:
    return S.diagonal(dim1=-2, dim2=-1).mean(-1)


def _plus_identity(S: Tensor, value: Tensor) -> Tensor:
    """S + value·I; only the diagonal of a copy is written."""
    diagonal = S.diagonal(dim1=-2, dim2=-1) + value[..., None]
    return torch.diagonal_scatter(S, diagonal, dim1=-2, dim2=-1)


# ---- inverse roots -------------------------------------------------------------------------------


def takes_products(method: RootMethod, device: torch.device) -> bool:
    """Whether roots are taken by products; "auto" decides by the device."""
    # On the CPU "auto" decomposes at every size. At the sides 16, 32, …, 2048, inverse fourth roots
    # of float32 matrices by products take 1.2, .8, 1.1, 1.8, 2.4, 3.4, 3.8 and 4.6 times as long as
    # by eigh: processor time of one thread, interleaved (AVX-512, MKL).
    return method == "products" or (method == "auto" and not linalg.decomposes_well(device))


def shift_of(max_condition: float | None) -> float:
    """The share of λ_max to add to every eigenvalue, so that the condition number is no larger."""
    return 0.0 if max_condition is None else 1 / (float(max_condition) - 1)


def inverse_root(
    S: Tensor, power: float, method: RootMethod = "eigh", shift: float = 0.0
) -> Tensor:
    """(S + shift·λ_max·I)^(−power); see `gomuon.functional.inverse_root`.

    Power ¼ gives the maps of Equation (29).
    """
    if is_diagonal(S) or not takes_products(method, S.device):
        return decomposed_root(S, power, shift)
    with full_float32():
        take = partial(product_root, power=power, shift=shift)
        roots, fine = over_batch(take, S, multiplies=True)
    if not bool(fine.all()):
        roots[~fine] = decomposed_root(S[~fine], power, shift)
    return roots


def decomposed_root(S: Tensor, power: float, shift: float = 0.0) -> Tensor:
    """(S + shift·λ_max·I)^(−power) with eigenvalues floored at roundoff scale.

    A diagonal gives a diagonal.
    """
    if is_diagonal(S):
        return _diagonal_root(S, power, shift)
    return over_batch(lambda part: (_decomposed_root(part, power, shift),), S)[0]


def _decomposed_root(S: Tensor, power: float, shift: float) -> Tensor:
    eigenvalues, V = decompose(torch.linalg.eigh, S)
    largest = eigenvalues[..., -1:]
    # Rounding errors are as large as d·ε·λ_max, so smaller eigenvalues have no correct digits.
    limits = torch.finfo(S.dtype)
    floor = (largest * S.shape[-1] * limits.eps).clamp_min(limits.tiny)
    if shift:
        eigenvalues = eigenvalues.clamp_min(0) + shift * largest
    floored = torch.where(largest > 0, eigenvalues.clamp_min(floor), 1.0)
    return inverse_power(floored, V, power)  # (29)


def _diagonal_root(S: Tensor, power: float, shift: float) -> Tensor:
    """Of diagonals [..., d, 1] or [..., 1, d], with the floor of `_decomposed_root`."""
    largest = S.amax(dim=(-2, -1), keepdim=True)
    limits = torch.finfo(S.dtype)
    floor = (largest * max(S.shape[-2:]) * limits.eps).clamp_min(limits.tiny)
    values = S.clamp_min(0) + shift * largest if shift else S
    return torch.where(largest > 0, values.clamp_min(floor), 1.0).pow(-power)


def inverse_power(values: Tensor, V: Tensor, power: float) -> Tensor:
    """V diag(values^−power) Vᵀ."""
    # Halving the power gives V·f·(V·f)ᵀ, symmetric up to the order of its sums.
    half = V * values.pow(-power / 2).unsqueeze(-2)
    return symmetric_product(half.mT)


# ---- roots of many factors at once, with one wait for the device ---------------------------------


@dataclass(frozen=True)
class Root:
    """What is made of each factor S, in two forms.

    Attributes:
        decomposed: of a batch, by decomposition.
        multiplied: the same by products, and which results can be trusted; see `product_root`. It
            is given the batch's `start` as well, if there is one. None if there is no such form.
        of_eigen: the same of eigenvalues [..., d], at least 0, and eigenvectors that are known.
            None if nobody asks for it.
    """

    decomposed: Callable[[Tensor], Tensor]
    multiplied: Callable[..., tuple[Tensor, Tensor]] | None = None
    of_eigen: Callable[[Tensor, Tensor], Tensor] | None = None

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
        store: called with this batch when all its roots are found; returns what got no root.
        prepared: what is done to all factors first, for example damping.
        start: what products start from, one for each factor, if they need it.
        products: roots by products, one for each factor, and what became of each, [b].
        outcomes: the same, read.
        decomposed: roots by decomposition, one for each factor, None where it failed.
    """

    factors: Tensor | Sequence[Tensor]
    root: Root
    store: Callable[["RootBatch"], list[Any]]
    prepared: Callable[[Tensor], Tensor] = lambda S: S
    start: Sequence[Tensor] | None = None
    products: tuple[Tensor, Tensor] | None = field(default=None, init=False)
    outcomes: Sequence[int] = field(default=(), init=False)
    decomposed: Sequence[Tensor | None] = field(default=(), init=False)

    @property
    def first(self) -> Tensor:
        """A factor, or all of them: for what they have in common."""
        return self.factors if isinstance(self.factors, Tensor) else self.factors[0]

    def multiply(self) -> None:
        """Take the roots by products. Nothing waits for them."""
        assert self.root.multiplied is not None
        S = self._stacked(self.factors)
        if is_diagonal(S):  # there is nothing to multiply
            roots = self.root.decomposed(S)
            self.products = roots, _outcomes(finite_factors(S), finite_factors(roots))
            return
        given = [S] if self.start is None else [S, torch.stack(list(self.start))]
        at_once = max(1, _AT_ONCE // S.shape[-1] ** 2)
        pieces = [
            over_batch(self.root.multiplied, *piece, multiplies=True)
            for piece in zip(*(X.flatten(0, -3).split(at_once) for X in given), strict=True)
        ]
        roots, fine = (torch.cat(parts) for parts in zip(*pieces, strict=True))
        fine = fine.view(len(S), -1).all(1)
        self.products = roots.unflatten(0, S.shape[:-2]), _outcomes(finite_factors(S), fine)

    def roots_or(self, instead: Tensor) -> Tensor:
        """Roots by products, `instead` for those that cannot be trusted. Does not wait."""
        assert self.products is not None
        roots, outcomes = self.products
        return torch.where((outcomes == _FINE).view(-1, *[1] * (roots.ndim - 1)), roots, instead)

    def decompose(self) -> list[Tensor | None]:
        return guarded(self.root.decomposed, self._stacked(self.factors))

    def result(self, index: int) -> tuple[Tensor | None, bool]:
        """The root of one factor, and whether it was decomposed because products failed.

        None if it cannot be computed, or the factor or the root is not finite.
        """
        if self.products is None:
            return self.decomposed[index], False
        if self.outcomes[index] != _DIVERGED:
            return self.products[0][index] if self.outcomes[index] == _FINE else None, False
        alone = self._stacked(self.factors[index : index + 1])
        found = guarded(self.root.decomposed, alone)[0]
        return found, found is not None

    def _stacked(self, factors: Tensor | Sequence[Tensor]) -> Tensor:
        return self.prepared(factors if isinstance(factors, Tensor) else torch.stack(list(factors)))


_NOT_FINITE, _FINE, _DIVERGED = range(3)  # what became of a factor that was multiplied
_AT_ONCE = 2**25  # largest number of elements that are multiplied at a time


def _outcomes(finite: Tensor, fine: Tensor) -> Tensor:
    """What became of factors, given which were finite and which of their roots can be trusted."""
    return finite.to(torch.int8) * torch.where(fine, _FINE, _DIVERGED).to(torch.int8)


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
    """Read what became of roots by products, and `more` numbers. Waits for the device once."""
    unread = [(batch, batch.products[1]) for batch in batches if batch.products is not None]
    flags = [*more, *(outcomes for _, outcomes in unread)]
    if not flags:
        return []
    device = flags[0].device
    numbers = iter(torch.cat([flag.to(device, torch.int8) for flag in flags]).tolist())
    lists = [list(islice(numbers, len(flag))) for flag in flags]
    for (batch, _), outcomes in zip(unread, lists[len(more) :], strict=True):
        batch.outcomes = outcomes
    return lists[: len(more)]


def store_roots(batches: Sequence[RootBatch]) -> list[Any]:
    """Store roots by products, which were read, then decompose the others and store these.

    Returns what got no root.
    """
    failed = [
        item for batch in batches if batch.products is not None for item in batch.store(batch)
    ]
    decomposed = [batch for batch in batches if batch.products is None]
    decomposed.sort(key=lambda batch: -batch.first.shape[-1])  # the largest matrices first
    found = concurrently([batch.decompose for batch in decomposed])
    for batch, results in zip(decomposed, found, strict=True):
        batch.decomposed = results
        failed += batch.store(batch)
        batch.decomposed = ()  # so that not all results are in memory at a time
    return failed


def take_roots(batches: Sequence[RootBatch], method: RootMethod) -> list[Any]:
    """Take and store all roots; returns what got none. Waits once for roots by products."""
    start_roots(batches, method)
    read_roots(batches)
    return store_roots(batches)
