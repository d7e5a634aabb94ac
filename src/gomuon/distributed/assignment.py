"""Chooses the rank that computes each matrix. Works on plain numbers, without torch.

Layers of a *unit* (`parameters/units.py`) have one owner, so that the root of the factor they share
is computed once. If one unit would be too much for a rank, it is split: then every owner receives
the shared sums and takes their root itself, and no map has to be sent. Owners hold the state and
must be known before a checkpoint is loaded. So they depend on names and shapes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gomuon.parameters.units import MapSizes, assign, refresh_turns, siblings, sums_and_roots

# A split must lower the largest load of a rank to this part of it: the sums of the inputs are then
# sent to several owners, and each takes their root.
WORTH_SPLITTING = 0.9


class TensorPart(NamedTuple):
    """What a rank has of a parameter before shards divide its rows.

    Attributes:
        rows: of the parameter, or of one of its parts under tensor parallelism.
        width: elements per row.
        parts: how many such parts the whole parameter has.
    """

    rows: int
    width: int
    parts: int = 1

    @property
    def elements(self) -> int:
        """Of the whole parameter."""
        return self.rows * self.width * self.parts


@dataclass(frozen=True)
class Unit:
    """Layers with one owner.

    Attributes:
        names: the names of the layers.
        tensors: every parameter.
        moments: how many numbers are sent to the owner for every captured sum.
        cost: the owner's work, used to balance the ranks.
        counts: how many numbers of rows are sent beside every sum; () if two beside each.
        group: the number of the layers' parameter group.
    """

    names: tuple[str, ...]
    tensors: tuple[TensorPart, ...]
    moments: tuple[int, ...] = ()
    cost: float = 0.0
    counts: tuple[int, ...] = ()
    group: int = 0

    @property
    def numbers_of_rows(self) -> int:
        """How many are sent beside all sums."""
        return sum(self.counts) if self.counts else 2 * len(self.moments)


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
    return blocks * (step + products) + root_cost(blocks, maps, refresh_every)


def root_cost(blocks: int, maps: MapSizes, refresh_every: int | None) -> float:
    """The part of it for the roots of these maps."""
    if refresh_every is None:
        return 0.0
    return 11 * blocks * sum(count * size**3 for count, size in maps) / refresh_every


def split_where_worth_it(
    units: Sequence[Sequence[int]], cost: Callable[[Sequence[int]], float], ranks: int
) -> tuple[list[Sequence[int]], list[int]]:
    """Units, or the matrices of those that were split, and the rank of each.

    Tried in this order: no unit is split; those are that cost more than a rank's mean load and than
    any single matrix, so that they limit the load; all are. Each must be worth it compared with
    what was best before.

    Args:
        units: the matrices of each unit, by number.
        cost: of matrices that have one owner.
        ranks: the number of ranks.
    """
    mean = sum(cost(unit) for unit in units) / max(ranks, 1)
    matrix = max((cost([i]) for unit in units for i in unit), default=0.0)

    def split(above: float) -> list[Sequence[int]]:
        matrices = [[[i] for i in unit] if cost(unit) > above else [unit] for unit in units]
        return [part for parts in matrices for part in parts]

    chosen: list[Sequence[int]] = []
    owners: list[int] = []
    smallest = float("inf")
    for parts in (list(units), split(above=max(mean, matrix)), split(above=0.0)):
        costs = [cost(part) for part in parts]
        found = assign(costs, ranks)
        largest = max(load_per_rank(costs, found, ranks))
        if largest < WORTH_SPLITTING * smallest:
            chosen, owners, smallest = parts, found, largest
    return chosen, owners


def with_even_turns(
    owners: Sequence[int], costs: Sequence[float], roots: Sequence[float], turns: Sequence[int]
) -> list[int]:
    """The owners, after units of equal cost were exchanged to make each owner's steps even.

    Every rank keeps as many units of each cost as it had, so its load stays what it was. Of the
    units that are left it takes those in whose turn it has the fewest roots to compute.

    Args:
        owners: the owner of each unit.
        costs: the cost of each unit.
        roots: the part of it that is due in the unit's turn.
        turns: the step of the interval in which each unit refreshes.
    """
    chosen = list(owners)
    due: dict[tuple[int, int], float] = {}  # by rank and turn
    alike: dict[tuple[float, float], list[int]] = {}
    for index, both in enumerate(zip(roots, costs, strict=True)):
        alike.setdefault(both, []).append(index)
    for (part, _), members in sorted(alike.items(), reverse=True):
        left: dict[int, list[int]] = {}
        for index in members:
            left.setdefault(turns[index], []).append(index)
        for rank in sorted(owners[index] for index in members):
            # Of turns with equally much to do, the one with the most units left.
            turn = min(left, key=lambda t: (due.get((rank, t), 0.0), -len(left[t]), t))
            due[rank, turn] = due.get((rank, turn), 0.0) + part
            chosen[left[turn].pop(0)] = rank
            if not left[turn]:
                del left[turn]
    return chosen


def owners_of(
    names: Sequence[str],
    shapes: Sequence[tuple[int, int, int]],
    refresh_every: int | None,
    ranks: int,
    *,
    together: bool,
    maps: Sequence[MapSizes] | None = None,
    group: int = 0,
) -> list[int]:
    """An owner for every matrix of a group, given by name and (blocks, rows, columns).

    `together` gives siblings one owner, for methods whose layers share factors or weights. `maps`
    are those of each matrix, see `matrix_cost`, if the method captures them. Then siblings share
    nothing but a factor and may be split, and refreshes may be staggered (`refresh_turns`, which
    begin with the number of the `group`); whether they are does not change the owners.
    """
    alone = [[index] for index in range(len(names))]
    units = siblings(names, [n for _, _, n in shapes]) if together else alone
    each: Sequence[MapSizes | None] = [None] * len(names) if maps is None else maps

    def cost(unit: Sequence[int]) -> float:
        """Of matrices with one owner: the root of a factor that they share is taken once."""
        total = sum(matrix_cost(*shapes[i], refresh_every, each[i]) for i in unit)
        shared: set[tuple[int, tuple[int, int]]] = set()
        for i in unit:
            own, blocks = each[i], shapes[i][0]
            if own is not None:
                if (blocks, own[1]) in shared:
                    total -= root_cost(blocks, own[1:], refresh_every)
                shared.add((blocks, own[1]))
        return total

    if maps is None or not together:
        parts: Sequence[Sequence[int]] = units
        chosen = assign([cost(unit) for unit in units], ranks)
    else:
        parts, chosen = split_where_worth_it(units, cost, ranks)
        if refresh_every is not None and refresh_every > 1:
            turns = refresh_turns(names, shapes, maps, refresh_every, group)
            roots = [sum(sums_and_roots(shapes[i][0], maps[i])[1] for i in part) for part in parts]
            due = [turns[part[0]] for part in parts]
            chosen = with_even_turns(chosen, [cost(part) for part in parts], roots, due)
    owners = [0] * len(names)
    for part, owner in zip(parts, chosen, strict=True):
        for index in part:
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
