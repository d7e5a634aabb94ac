"""Chooses the rank that computes each matrix. Works on plain numbers, without torch.

Layers of a *unit* (`parameters/units.py`) have one owner: then no map has to be sent. Owners hold
the state and must be known before a checkpoint is loaded. So they depend on names and shapes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from gomuon.parameters.units import MapSizes, assign, refresh_turns, siblings, sums_and_roots


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
    are those of each matrix, see `matrix_cost`. If the method captures them, refreshes may be
    staggered (`refresh_turns`, which begin with the number of the `group`); whether they are does
    not change the owners.
    """
    alone = [[index] for index in range(len(names))]
    units = siblings(names, [n for _, _, n in shapes]) if together else alone
    each: Sequence[MapSizes | None] = [None] * len(names) if maps is None else maps
    costs = [sum(matrix_cost(*shapes[i], refresh_every, each[i]) for i in unit) for unit in units]
    chosen = assign(costs, ranks)
    if maps is not None and together and refresh_every is not None and refresh_every > 1:
        turns = refresh_turns(names, shapes, maps, refresh_every, group)
        roots = [sum(sums_and_roots(shapes[i][0], maps[i])[1] for i in unit) for unit in units]
        chosen = with_even_turns(chosen, costs, roots, [turns[unit[0]] for unit in units])
    owners = [0] * len(names)
    for unit, owner in zip(units, chosen, strict=True):
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
