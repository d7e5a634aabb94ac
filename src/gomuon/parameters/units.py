"""Units: layers that belong together, and when each of them refreshes. Works on plain numbers.

Layers that read the same input share its factor A and the root of A, so they should have one owner
and refresh in the same step. Which layers share an input is known only after a forward pass. So
units are formed by name and shape.
"""

import heapq
from collections.abc import Hashable, Sequence

# (number, side) of the square matrices that the left and the right map of a matrix are made of.
MapSizes = Sequence[tuple[int, int]]


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


def assign(costs: Sequence[float], ranks: int) -> list[int]:
    """A rank for every cost: the largest cost first, each to the rank with the smallest load.

    Graham's longest-processing-time rule: the largest load is at most 4/3 of the optimum. Ties are
    broken by position and by rank number, so every process finds the same ranks.

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


def sums_and_roots(blocks: int, maps: MapSizes) -> tuple[float, float]:
    """About the numbers in a layer's captured sums, and the operations of its roots."""
    sums = blocks * sum(count * size**2 for count, size in maps)
    return float(sums), float(blocks * sum(count * size**3 for count, size in maps))


def refresh_turns(
    names: Sequence[str],
    shapes: Sequence[tuple[int, int, int]],
    maps: Sequence[MapSizes],
    every: int,
    first: int = 0,
) -> list[int]:
    """The turn of every layer of a group, 0 … `every` − 1: it refreshes if t mod K is its turn.

    A unit has one turn. Turns have even shares of the captured sums, which every rank computes and
    sends, and of the roots, which owners compute: a unit costs the sum of both shares. Turns do not
    depend on the number of ranks, so one process with the same settings takes the same steps.

    Args:
        names: the layers' names.
        shapes: (matrices, rows, columns) of each layer.
        maps: the sizes of each layer's maps.
        every: K.
        first: where to begin. Groups begin at different turns, because each may be one layer.
    """
    units = siblings(names, [n for _, _, n in shapes])
    parts = [sums_and_roots(blocks, own) for (blocks, _, _), own in zip(shapes, maps, strict=True)]
    totals = [sum(column) or 1.0 for column in zip(*parts, strict=True)] or [1.0, 1.0]
    shares = [sum(part / total for part, total in zip(own, totals, strict=True)) for own in parts]
    turns = [0] * len(names)
    costs = [sum(shares[i] for i in unit) for unit in units]
    chosen = assign(costs, min(every, len(units)) or 1)  # as with all turns: empty ones come first
    for unit, turn in zip(units, chosen, strict=True):
        for index in unit:
            turns[index] = (turn + first) % every
    return turns


def as_phase(turn: int, every: int) -> float:
    """A turn as a fraction of the interval. It is inside of its step, so no rounding moves it."""
    return (turn + 0.5) / every
