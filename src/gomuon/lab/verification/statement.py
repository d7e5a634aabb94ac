"""A statement: what the paper or this package says, and how to search for a case against it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gomuon.lab.verification.adversary import Case, Effort, Found, attack

Search = Callable[[Effort, torch.Generator], Found]

ROUNDING = 1e-9  # how far below zero a slack may fall in float64, unless a statement says otherwise


@dataclass(frozen=True)
class Statement:
    """A row of `gomuon verify`.

    The slack is what is left before the statement breaks. Of a bound, it is the share of the bound
    that was not reached. Of an identity, it is minus the largest relative error. Of something that
    may happen, it is how far the clearest example is beyond what was asked for.

    Attributes:
        name: a few words, unique; docs/equations.md uses it too.
        where: the number in the paper.
        says: the statement as a formula.
        search: looks for the worst case.
        allowed: the slack may fall below zero by this much.
    """

    name: str
    where: str
    says: str
    search: Search
    allowed: float = ROUNDING


def always(*cases: Case) -> Search:
    """The worst of all cases; the statement must hold in every one."""

    def search(effort: Effort, generator: torch.Generator) -> Found:
        found = [attack(case, effort, generator) for case in cases]
        return Found(sum(one.tried for one in found), _least([one.slack for one in found]))

    return search


def sometimes(*cases: Case) -> Search:
    """The clearest example of every case; the statement says that there is one of each."""

    def search(effort: Effort, generator: torch.Generator) -> Found:
        found = [attack(case, effort, generator, exists=True) for case in cases]
        return Found(sum(one.tried for one in found), _least([one.slack for one in found]))

    return search


def _least(slacks: list[float]) -> float:
    """The least; NaN if one is NaN."""
    return float(torch.tensor(slacks, dtype=torch.float64).amin())


# ---- what many slacks are made of ----------------------------------------------------------------


def inner(X: Tensor, Y: Tensor) -> Tensor:
    """⟨X, Y⟩, [b]."""
    return (X * Y).sum(dim=(-2, -1))


def nuclear(X: Tensor) -> Tensor:
    """‖X‖_*, [b]."""
    return torch.linalg.matrix_norm(X, ord="nuc")


def operator(X: Tensor) -> Tensor:
    """‖X‖_op, [b]."""
    return torch.linalg.matrix_norm(X, ord=2)


def frobenius(X: Tensor) -> Tensor:
    """‖X‖_F, [b]."""
    return torch.linalg.matrix_norm(X)


def equal(a: Tensor, b: Tensor, scale: Tensor | float) -> Tensor:
    """The slack of a = b, relative to `scale`: that of the terms whose rounding counts."""
    return -(a - b).abs() / scale


def same_matrix(X: Tensor, Y: Tensor, scale: Tensor | float) -> Tensor:
    """The slack of X = Y, [b]."""
    return -frobenius(X - Y) / scale


def at_most(small: Tensor, large: Tensor) -> Tensor:
    """The slack of small ≤ large, for positive numbers: the share that is left."""
    return 1 - small / large
