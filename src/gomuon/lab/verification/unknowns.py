"""What an instance of a statement consists of: matrices, distributions and numbers.

Each unknown is made from a vector of plain numbers. The search changes these numbers freely, and
whatever they are, the result is of the right kind: orthogonal, positive definite, of a given rank.
So no change is ever refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class Unknown(Protocol):
    """One part of an instance."""

    @property
    def size(self) -> int:
        """How many numbers it is made of."""

    def start(self, numbers: Tensor, simple: Tensor) -> Tensor:
        """Where the search begins, [b, size], given standard normal numbers.

        `simple`, [b], marks starts that are (nearly) diagonal: many bounds are tight there.
        """

    def made(self, numbers: Tensor) -> Any:
        """The unknown itself, of numbers [b, size]."""


@dataclass(frozen=True)
class Fixed:
    """For a statement about one instance: no numbers at all, [b, 0], on the device."""

    size = 0

    def start(self, numbers: Tensor, simple: Tensor) -> Tensor:
        return numbers

    def made(self, numbers: Tensor) -> Tensor:
        return numbers


@dataclass(frozen=True)
class Numbers:
    """A tensor [b, *shape] of any numbers."""

    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return torch.Size(self.shape).numel()

    def start(self, numbers: Tensor, simple: Tensor) -> Tensor:
        return numbers

    def made(self, numbers: Tensor) -> Tensor:
        return numbers.unflatten(-1, self.shape)


@dataclass(frozen=True)
class Rotation:
    """An orthogonal matrix [b, d, d]."""

    d: int

    @property
    def size(self) -> int:
        return self.d * self.d

    def start(self, numbers: Tensor, simple: Tensor) -> Tensor:
        identity = torch.eye(self.d, dtype=numbers.dtype).flatten()
        return torch.where(simple[:, None], identity + 0.01 * numbers, numbers)

    def made(self, numbers: Tensor) -> Tensor:
        Q, R = torch.linalg.qr(numbers.unflatten(-1, (self.d, self.d)))
        # With these signs Q changes little where the numbers do.
        return Q * torch.where(R.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).unsqueeze(-2)


@dataclass(frozen=True)
class Spectrum:
    """Positive numbers [b, k], their ratios at most 10^decades."""

    k: int
    decades: float

    @property
    def size(self) -> int:
        return self.k

    def start(self, numbers: Tensor, simple: Tensor) -> Tensor:
        return numbers

    def made(self, numbers: Tensor) -> Tensor:
        return torch.pow(10.0, self.decades / 2 * numbers.clamp(-1, 1))


@dataclass(frozen=True)
class PositiveDefinite:
    """Symmetric positive-definite matrices [b, d, d], by eigenvectors and eigenvalues."""

    V: Tensor
    values: Tensor

    def power(self, exponent: float) -> Tensor:
        """Without a decomposition."""
        return (self.V * self.values.pow(exponent).unsqueeze(-2)) @ self.V.mT

    @property
    def condition(self) -> Tensor:
        """κ₂, [b]."""
        return self.values.amax(-1) / self.values.amin(-1)

    @property
    def norm(self) -> Tensor:
        """‖·‖₂, [b]."""
        return self.values.amax(-1)


@dataclass(frozen=True)
class FactorMatrix:
    """A symmetric positive-definite d×d matrix with κ₂ up to 10^decades."""

    d: int
    decades: float = 4.0

    @property
    def _parts(self) -> tuple[Rotation, Spectrum]:
        return Rotation(self.d), Spectrum(self.d, self.decades)

    @property
    def size(self) -> int:
        return sum(part.size for part in self._parts)

    def start(self, numbers: Tensor, simple: Tensor) -> Tensor:
        return start_of(self._parts, numbers, simple)

    def made(self, numbers: Tensor) -> PositiveDefinite:
        return PositiveDefinite(*made_of(self._parts, numbers))


@dataclass(frozen=True)
class SourceMatrix:
    """A matrix [b, m, n] of this rank (default: full), its nonzero singular values in a range."""

    m: int
    n: int
    rank: int | None = None
    decades: float = 4.0

    @property
    def _parts(self) -> tuple[Rotation, Spectrum, Rotation]:
        rank = min(self.m, self.n) if self.rank is None else self.rank
        return Rotation(self.m), Spectrum(rank, self.decades), Rotation(self.n)

    @property
    def size(self) -> int:
        return sum(part.size for part in self._parts)

    def start(self, numbers: Tensor, simple: Tensor) -> Tensor:
        return start_of(self._parts, numbers, simple)

    def made(self, numbers: Tensor) -> Tensor:
        U, sigma, V = made_of(self._parts, numbers)
        k = sigma.shape[-1]
        return (U[..., :k] * sigma.unsqueeze(-2)) @ V[..., :k].mT


@dataclass(frozen=True)
class Distribution:
    """Probabilities [b, c], from flat to almost a point mass."""

    c: int

    @property
    def size(self) -> int:
        return self.c

    def start(self, numbers: Tensor, simple: Tensor) -> Tensor:
        return torch.where(simple[:, None], 4 * numbers, numbers)

    def made(self, numbers: Tensor) -> Tensor:
        return (3 * numbers).softmax(-1)


@dataclass(frozen=True)
class Between:
    """A number [b] between two others."""

    low: float
    high: float

    size = 1

    def start(self, numbers: Tensor, simple: Tensor) -> Tensor:
        return numbers

    def made(self, numbers: Tensor) -> Tensor:
        return self.low + (self.high - self.low) * (numbers[..., 0].clamp(-1, 1) + 1) / 2


@dataclass(frozen=True)
class Whole:
    """A whole number [b] from 1 to `most`, small ones as often as large ones."""

    most: int

    size = 1

    def start(self, numbers: Tensor, simple: Tensor) -> Tensor:
        return numbers

    def made(self, numbers: Tensor) -> Tensor:
        share = (numbers[..., 0].clamp(-1, 1) + 1) / 2
        return torch.pow(float(self.most), share).round()


def start_of(parts: tuple[Unknown, ...], numbers: Tensor, simple: Tensor) -> Tensor:
    """The starts of several unknowns, one after another."""
    pieces = numbers.split([part.size for part in parts], -1)
    both = zip(parts, pieces, strict=True)
    return torch.cat([numbers[:, :0], *(part.start(piece, simple) for part, piece in both)], -1)


def made_of(parts: tuple[Unknown, ...], numbers: Tensor) -> list[Any]:
    """Several unknowns of their numbers, which stand one after another."""
    pieces = numbers.split([part.size for part in parts], -1)
    return [part.made(piece) for part, piece in zip(parts, pieces, strict=True)]
