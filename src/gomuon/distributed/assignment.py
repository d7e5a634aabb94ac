"""Who computes which matrices when there are several ranks; plain numbers, no torch.

Layers that read one input share its factor A and its root, so they should have one owner: no map
ever has to travel. Who shares is known only once a forward pass has run, but owners hold the state
and must be known before a checkpoint is loaded. So a *unit* is told by name and shape.
"""

import heapq
from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Unit:
    """Layers with one owner, in numbers.

    Attributes:
        names: the layers.
        tensors: (rows, elements in a row) of every parameter in it, as shards cut them.
        moments: elements of every captured sum that goes to the owner.
        cost: what the owner's work is weighed by.
    """

    names: tuple[str, ...]
    tensors: tuple[tuple[int, int], ...]
    moments: tuple[int, ...] = ()
    cost: float = 0.0


def siblings(names: Sequence[str], inputs: Sequence[int]) -> list[list[int]]:
    """Positions of the parameters that form a unit, in order of first appearance.

    Modules of one parent with equally many inputs go together: q, k, v (and o) of an attention,
    gate and up of an MLP. Members of a list (`blocks.3`) and modules at the top stand alone.
    """
    units: dict[Hashable, list[int]] = {}
    for index, (name, n) in enumerate(zip(names, inputs, strict=True)):
        parent, _, module = name.rpartition(".")[0].rpartition(".")
        together = parent and not module.isdigit()
        units.setdefault((parent, n) if together else index, []).append(index)
    return list(units.values())


def matrix_cost(
    blocks: int,
    m: int,
    n: int,
    refresh_every: int | None,
    sides: tuple[bool, bool] = (True, True),
) -> float:
    """What a matrix weighs when owners are chosen: its polar factor, and its roots every K steps.

    Roughly its FLOPs; only the proportions matter. `sides` says which of (left, right) have maps.
    """
    small, large = min(m, n), max(m, n)
    # About the rounds of "polar-express"; an SVD has fewer operations, but slower ones.
    step = 16 * (4 * large * small**2 + 2 * small**3)
    if refresh_every is None:
        return float(blocks * step)
    mapped = [side for side, has_map in zip((m, n), sides, strict=True) if has_map]
    products = 4 * m * n * sum(mapped)
    return blocks * (step + products + 11 * sum(side**3 for side in mapped) / refresh_every)


def assign(costs: Sequence[float], ranks: int) -> list[int]:
    """An owner for every cost: the largest first, each to the rank with the least so far.

    Graham's longest-processing-time rule, at most 4/3 of the best possible. Equal costs go in
    their order and equal ranks by number, so every rank finds the same owners for itself.

    Raises:
        ValueError: there is no rank, or a cost is negative or not a number.
    """
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, got {ranks}")
    for cost in costs:
        if not cost >= 0:
            raise ValueError(f"a cost must be a number >= 0, got {cost!r}")
    owners = [0] * len(costs)
    # The number of units breaks ties before the rank does, so that units without cost spread too.
    waiting = [(0.0, 0, rank) for rank in range(ranks)]
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        load, held, rank = heapq.heappop(waiting)
        owners[index] = rank
        heapq.heappush(waiting, (load + costs[index], held + 1, rank))
    return owners


def owners_of(
    names: Sequence[str],
    shapes: Sequence[tuple[int, int, int]],
    refresh_every: int | None,
    ranks: int,
    *,
    together: bool,
    sides: tuple[bool, bool] = (True, True),
) -> list[int]:
    """An owner for every matrix of a group, given by name and (blocks, rows, columns).

    `together` keeps siblings together, for methods whose layers share something; `sides` says which
    sides have maps.
    """
    alone = [[index] for index in range(len(names))]
    units = siblings(names, [n for _, _, n in shapes]) if together else alone
    costs = [sum(matrix_cost(*shapes[i], refresh_every, sides) for i in unit) for unit in units]
    owners = [0] * len(names)
    for unit, owner in zip(units, assign(costs, ranks), strict=True):
        for index in unit:
            owners[index] = owner
    return owners


def loads(costs: Sequence[float], owners: Sequence[int], ranks: int) -> list[float]:
    """What every rank carries."""
    totals = [0.0] * ranks
    for cost, owner in zip(costs, owners, strict=True):
        totals[owner] += cost
    return totals


def imbalance(carried: Sequence[float]) -> float:
    """Largest over mean, which the busiest rank makes the others wait; 1 where nothing is done."""
    mean = sum(carried) / len(carried)
    return max(carried) / mean if mean else 1.0
