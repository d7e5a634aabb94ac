"""Turns of staggered refreshes: even over the steps and over the owners, for any model."""

from hypothesis import given
from hypothesis import strategies as st

from gomuon.distributed.assignment import load_per_rank, owners_of, with_even_turns
from gomuon.parameters.units import as_phase, assign, refresh_turns, siblings, sums_and_roots

SIDES = st.integers(1, 40)
SHAPES = st.lists(st.tuples(SIDES, SIDES), max_size=30)
INTERVALS = st.integers(1, 12)


def described(
    sides: list[tuple[int, int]],
) -> tuple[list[str], list[tuple[int, int, int]], list[list[tuple[int, int]]]]:
    """Two layers in every block, as names, shapes and maps."""
    names = [f"blocks.{i // 2}.mlp.{'ab'[i % 2]}.weight" for i in range(len(sides))]
    return names, [(1, m, n) for m, n in sides], [[(1, m), (1, n)] for m, n in sides]


@given(SHAPES, INTERVALS, st.integers(0, 5))
def test_turns_are_even_in_sums_and_roots_to_one_unit(
    sides: list[tuple[int, int]], every: int, first: int
) -> None:
    names, shapes, maps = described(sides)
    turns = refresh_turns(names, shapes, maps, every, first)
    assert all(turn in range(every) for turn in turns)
    units = siblings(names, [n for _, n in sides])
    parts = [sums_and_roots(1, own) for own in maps]
    totals = [sum(column) for column in zip(*parts, strict=True)]
    load, largest = [0.0] * every, 0.0
    for unit in units:
        assert len({turns[i] for i in unit}) == 1, "a unit has one turn"
        cost = sum(part / total for i in unit for part, total in zip(parts[i], totals, strict=True))
        load[turns[unit[0]]] += cost
        largest = max(largest, cost)
    assert max(load) <= sum(load) / every + (1 - 1 / every) * largest + 1e-9  # Graham's bound


@given(st.integers(1, 40), INTERVALS)
def test_equal_units_are_dealt_out(number: int, every: int) -> None:
    names = [f"layers.{i}.weight" for i in range(number)]
    turns = refresh_turns(names, [(1, 4, 4)] * number, [[(1, 4), (1, 4)]] * number, every)
    counts = [turns.count(turn) for turn in range(every)]
    assert max(counts) - min(counts) <= 1


def test_groups_of_one_layer_begin_at_different_turns() -> None:
    one = [refresh_turns(["a.weight"], [(1, 4, 4)], [[(1, 4)]], 4, group) for group in range(6)]
    assert one == [[0], [1], [2], [3], [0], [1]]
    assert refresh_turns([], [], [], 4) == []


@given(st.integers(1, 200), st.data())
def test_a_phase_falls_into_its_step(every: int, data: st.DataObject) -> None:
    turn = data.draw(st.integers(0, every - 1))
    assert int(as_phase(turn, every) * every) == turn


COSTS = st.lists(st.sampled_from([1.0, 2.0, 5.0]), max_size=40)


@given(COSTS, st.integers(1, 6), st.integers(2, 6))
def test_even_turns_leave_every_load_as_it_was(costs: list[float], ranks: int, every: int) -> None:
    owners, turns = assign(costs, ranks), assign(costs, every)
    chosen = with_even_turns(owners, costs, costs, turns)
    assert load_per_rank(costs, chosen, ranks) == load_per_rank(costs, owners, ranks)
    for cost in set(costs):
        alike = [index for index, other in enumerate(costs) if other == cost]
        assert sorted(owners[i] for i in alike) == sorted(chosen[i] for i in alike)


@given(st.integers(1, 8), st.integers(1, 6), st.integers(2, 6))
def test_equal_units_of_an_owner_take_different_turns(each: int, ranks: int, every: int) -> None:
    """An owner of `each` units has at most one more in a step than ⌈each / K⌉."""
    number = each * ranks
    names = [f"layers.{i}.weight" for i in range(number)]
    shapes, maps = [(1, 4, 4)] * number, [[(1, 4), (1, 4)]] * number
    owners = owners_of(names, shapes, every, ranks, together=True, maps=maps)
    turns = refresh_turns(names, shapes, maps, every)
    for rank in range(ranks):
        own = [turn for turn, owner in zip(turns, owners, strict=True) if owner == rank]
        assert len(own) == each
        assert max(own.count(turn) for turn in range(every)) <= -(-each // every) + 1
