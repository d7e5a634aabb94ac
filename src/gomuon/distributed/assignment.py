"""Chooses the rank that computes each matrix. Works on plain numbers, without torch.

Layers that read the same input share its factor A and the root of A, so they should have one owner:
then no map has to be sent. Which layers share an input is known only after a forward pass. But
owners hold the state and must be known before a checkpoint is loaded. So *units* (layers with one
owner) are formed by name and shape.
"""

import heapq
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

# (number, side) of the square matrices that the maps of a matrix are made of.
MapSizes = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Unit:
    """Layers with one owner.

    Attributes:
        names: the names of the layers.
        tensors: (rows, elements per row) of every parameter. Shards divide the rows.
        moments: how many numbers are sent to the owner for every captured sum.
        cost: the owner's work, used to balance the ranks.
    """

    names: tuple[str, ...]
    tensors: tuple[tuple[int, int], ...]
    moments: tuple[int, ...] = ()
    cost: float = 0.0


def siblings(names: Sequence[str], inputs: Sequence[int]) -> list[list[int]]:
    """The positions of the parameters of each unit, in order of first appearance.

    Modules with the same parent and the same number of inputs form a unit: q, k, v (and o) of an
    attention, gate and up of an MLP. A member of a list (`blocks.3`) or a top-level module is a
    unit by itself.
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
    maps: MapSizes | None = None,
) -> float:
    """The cost of a matrix when owners are chosen: its polar factor, and its roots every K steps.

    Approximately its FLOPs; only ratios matter. Without `maps` both sides have whole ones.
    """
    small, large = min(m, n), max(m, n)
    # The steps of the fast polar factor. An SVD has fewer operations, but slower ones.
    step = 6 * (4 * large * small**2 + 2 * small**3)
    if refresh_every is None:
        return float(blocks * step)
    maps = ((1, m), (1, n)) if maps is None else maps
    products = 4 * m * n * sum(size for _, size in maps)
    roots = 11 * sum(count * size**3 for count, size in maps)
    return blocks * (step + products + roots / refresh_every)


def assign(costs: Sequence[float], ranks: int) -> list[int]:
    """An owner for every cost: the largest cost first, each to the rank with the smallest load.

    Graham's longest-processing-time rule: the largest load is at most 4/3 of the optimum. Ties are
    broken by position and by rank number, so every rank computes the same owners.

    Raises:
        ValueError: `ranks` is below 1, or a cost is negative or NaN.
    """
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, got {ranks}")
    for cost in costs:
        if not cost >= 0:
            raise ValueError(f"a cost must be a number >= 0, got {cost!r}")
    owners = [0] * len(costs)
    # The number of units breaks ties before the rank does, so units without cost are spread too.
    queue = [(0.0, 0, rank) for rank in range(ranks)]
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        load, units, rank = heapq.heappop(queue)
        owners[index] = rank
        heapq.heappush(queue, (load + costs[index], units + 1, rank))
    return owners


def owners_of(
    names: Sequence[str],
    shapes: Sequence[tuple[int, int, int]],
    refresh_every: int | None,
    ranks: int,
    *,
    together: bool,
    maps: Sequence[MapSizes | None] | None = None,
) -> list[int]:
    """An owner for every matrix of a group, given by name and (blocks, rows, columns).

    `together` gives siblings one owner, for methods whose layers share factors or weights. `maps`
    are those of each matrix, see `matrix_cost`.
    """
    alone = [[index] for index in range(len(names))]
    units = siblings(names, [n for _, _, n in shapes]) if together else alone
    each = [None] * len(names) if maps is None else maps
    costs = [sum(matrix_cost(*shapes[i], refresh_every, each[i]) for i in unit) for unit in units]
    owners = [0] * len(names)
    for unit, owner in zip(units, assign(costs, ranks), strict=True):
        for index in unit:
            owners[index] = owner
    return owners


def load_per_rank(costs: Sequence[float], owners: Sequence[int], ranks: int) -> list[float]:
    """The total cost of each rank's units."""
    totals = [0.0] * ranks
    for cost, owner in zip(costs, owners, strict=True):
        totals[owner] += cost
    return totals


def imbalance(loads: Sequence[float]) -> float:
    """Largest load divided by the mean load; 1 if there is no load."""
    total = sum(loads)
    # One division, so that one rank with all the load gives exactly the number of ranks.
    return max(loads) * len(loads) / total if total else 1.0
