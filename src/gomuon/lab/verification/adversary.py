"""The search that tries to break a statement.

It starts from several random instances and changes each of them step by step: every round tries
changes of all sizes, of all numbers or of a few, and keeps the best one if it comes nearer to
breaking the statement. Nothing is differentiated, so it also works where singular values meet or
vanish.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gomuon.lab.verification.unknowns import Unknown, made_of, start_of

LARGEST, SMALLEST = 1.0, 1e-5  # of a change, in standard deviations
FEW = 2  # numbers that a sparse change touches, on average


@dataclass(frozen=True)
class Effort:
    """How hard to search, and where.

    Attributes:
        device: computes; it must support float64.
        seeds: pairs of starts for each case, one general and one nearly diagonal.
        rounds: of changes, from every start.
        tries: changes in a round, from every start.
    """

    device: torch.device
    seeds: int
    rounds: int = 100
    tries: int = 24

    def generator(self, name: str) -> torch.Generator:
        """Random numbers of a statement. Those of others do not move them."""
        return torch.Generator().manual_seed(zlib.crc32(name.encode()))


@dataclass(frozen=True)
class Case:
    """Instances of one form.

    Attributes:
        unknowns: what an instance consists of; `Fixed` if there is only one instance.
        slack: of the unknowns, each [b, …], how much room is left before the statement breaks, [b].
            Below zero it is broken.
    """

    unknowns: tuple[Unknown, ...]
    slack: Callable[..., Tensor]


@dataclass(frozen=True)
class Found:
    """What a search found: how many instances it tried, and the slack of the worst."""

    tried: int
    slack: float


def attack(case: Case, effort: Effort, generator: torch.Generator, exists: bool = False) -> Found:
    """Look for the instance with the least slack; with `exists`, for the one with the most."""

    def judge(points: Tensor) -> Tensor:
        """The lower, the better for the search."""
        slack = case.slack(*made_of(case.unknowns, points.to(effort.device))).cpu()
        slack = slack.expand(len(points))
        # NaN breaks a statement, and is no example of anything.
        return torch.where(slack.isnan(), torch.inf if exists else -torch.inf, _signed(slack))

    def _signed(slack: Tensor) -> Tensor:
        return -slack if exists else slack

    size = sum(unknown.size for unknown in case.unknowns)
    if not size:
        worst = judge(torch.zeros(1, 0, dtype=torch.float64))
        return Found(1, float(_signed(worst)))

    def normal(*shape: int) -> Tensor:
        # On the CPU, so that every device gets the same numbers.
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    starts = 2 * effort.seeds
    simple = torch.arange(starts) % 2 == 1
    points = start_of(case.unknowns, normal(starts, size), simple)
    worst = judge(points)
    sizes = torch.logspace(math.log10(LARGEST), math.log10(SMALLEST), effort.tries).double()
    moved = torch.zeros_like(points)
    for _ in range(effort.rounds):
        changes = normal(starts, effort.tries, size) * sizes[:, None]
        few = torch.rand(starts, effort.tries // 2, size, generator=generator) < FEW / size
        changes[:, ::2][:, : few.shape[1]] *= few
        changes[:, -1] = 2 * moved  # farther in the direction that helped
        tried = points[:, None] + changes
        found, best = judge(tried.flatten(0, 1)).view(starts, -1).min(1)
        nearer = found < worst
        chosen = changes[torch.arange(starts), best]
        moved = torch.where(nearer[:, None], chosen, 0.0)
        points = points + moved
        worst = torch.where(nearer, found, worst)
    return Found(starts * (1 + effort.rounds * effort.tries), float(_signed(worst.min())))
