"""Owners and what is sent to and from them: properties, and cases worked out by hand."""

import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gomuon.distributed.assignment import (
    WORTH_SPLITTING,
    TensorPart,
    Unit,
    imbalance,
    load_per_rank,
    matrix_cost,
    owners_of,
    split_where_worth_it,
)
from gomuon.distributed.shards import shard_rows
from gomuon.lab.costs.traffic import Mesh, replicated_bytes, status_bytes, step_bytes, wrapper_bytes
from gomuon.parameters.units import assign, siblings

COSTS = st.lists(st.integers(0, 10**6).map(float), max_size=40)
RANKS = st.integers(1, 12)


@given(COSTS, RANKS)
def test_every_unit_has_one_owner_that_every_rank_finds_for_itself(
    costs: list[float], ranks: int
) -> None:
    owners = assign(costs, ranks)
    assert len(owners) == len(costs)
    assert all(owner in range(ranks) for owner in owners)
    assert owners == assign(tuple(costs), ranks)
    assert sum(load_per_rank(costs, owners, ranks)) == sum(costs)


@given(COSTS, RANKS)
def test_the_busiest_rank_is_within_grahams_bounds(costs: list[float], ranks: int) -> None:
    carried = load_per_rank(costs, assign(costs, ranks), ranks)
    mean, largest = sum(costs) / ranks, max(costs, default=0.0)
    assert max(carried) <= mean + (1 - 1 / ranks) * largest + 1e-6
    assert max(carried) <= sum(costs)
    assert 1 <= imbalance(carried) <= ranks


@given(st.lists(st.integers(1, 50).map(float), min_size=1, max_size=6), st.integers(1, 3))
def test_it_is_at_most_a_third_above_the_best(costs: list[float], ranks: int) -> None:
    carried = max(load_per_rank(costs, assign(costs, ranks), ranks))
    best = min(
        max(load_per_rank(costs, owners, ranks))
        for owners in itertools.product(range(ranks), repeat=len(costs))
    )
    assert carried <= (4 / 3 - 1 / (3 * ranks)) * best + 1e-9


@given(COSTS, RANKS)
def test_more_units_than_ranks_leave_no_rank_idle(costs: list[float], ranks: int) -> None:
    assert len(set(assign(costs, ranks))) == min(ranks, len(costs))


def test_ties_go_by_order() -> None:
    assert assign([1.0, 1.0, 1.0, 1.0], 2) == [0, 1, 0, 1]
    assert assign([0.0, 0.0, 5.0], 3) == [1, 2, 0]
    assert assign([3.0, 3.0, 2.0, 2.0, 2.0], 2) == [0, 1, 0, 1, 0]


def test_nothing_to_do_is_balanced() -> None:
    assert assign([], 3) == []
    assert imbalance([0.0, 0.0]) == 1.0
    assert imbalance([3.0, 1.0]) == 1.5


@pytest.mark.parametrize(
    ("costs", "ranks", "words"),
    [([1.0], 0, "got 0"), ([-1.0], 1, "got -1.0"), ([float("nan")], 1, "got nan")],
)
def test_nonsense_is_refused(costs: list[float], ranks: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        assign(costs, ranks)
    with pytest.raises(ValueError, match="0 × 2"):
        Mesh(0, 2)


# ---- units that are split --------------------------------------------------------------------

UNIT_COSTS = st.lists(
    st.lists(st.integers(1, 1000).map(float), min_size=1, max_size=4), max_size=12
)


@given(UNIT_COSTS, st.integers(0, 500).map(float), RANKS)
def test_units_are_split_only_where_the_largest_load_falls_by_a_tenth(
    sizes: list[list[float]], shared: float, ranks: int
) -> None:
    """Every part of a unit has a cost of its own that a whole unit has once."""
    costs = list(itertools.chain(*sizes))
    numbers = iter(range(len(costs)))
    units = [[next(numbers) for _ in unit] for unit in sizes]

    def cost(part: Sequence[int]) -> float:
        return shared + sum(costs[i] for i in part)

    def largest(parts: Sequence[Sequence[int]]) -> float:
        each = [cost(part) for part in parts]
        return max(load_per_rank(each, assign(each, ranks), ranks))

    parts, owners = split_where_worth_it(units, cost, ranks)
    assert [i for part in parts for i in part] == list(range(len(costs)))
    assert all(part in units or len(part) == 1 for part in parts)
    carried = max(load_per_rank([cost(part) for part in parts], owners, ranks))
    assert carried == largest(parts)
    whole = largest(units)
    if parts == units:
        each = [cost([i]) for i in range(len(costs))]
        limit = max([sum(cost(unit) for unit in units) / ranks, *each])
        above = [[[i] for i in unit] if cost(unit) > limit else [unit] for unit in units]
        for split in ([part for own in above for part in own], [[i] for i in range(len(costs))]):
            assert largest(split) >= WORTH_SPLITTING * whole
    else:
        assert carried < WORTH_SPLITTING * whole


# A Llama's block, 64 times smaller: gate and up read one tensor and are its largest unit.
BLOCK = {"attention.q": (128, 128), "attention.k": (16, 128), "attention.v": (16, 128),
         "attention.o": (128, 128), "mlp.gate": (448, 128), "mlp.up": (448, 128),
         "mlp.down": (128, 448)}  # fmt: skip


def llama(layers: int, ranks: int, block: int) -> tuple[dict[str, int], float, float]:
    """Owners, and their imbalance with and without splits."""
    names = [f"layers.{i}.{name}.weight" for i in range(layers) for name in BLOCK]
    sides = list(BLOCK.values()) * layers
    shapes = [(1, m, n) for m, n in sides]
    maps = [[(-(-d // block), block) for d in both] for both in sides]
    owners = owners_of(names, shapes, 4, ranks, together=True, maps=maps)
    costs = [matrix_cost(*shape, 4, own) for shape, own in zip(shapes, maps, strict=True)]
    whole = owners_of(names, shapes, 4, ranks, together=True)  # as if they were not captured
    split, together = (imbalance(load_per_rank(costs, chosen, ranks)) for chosen in (owners, whole))
    return dict(zip(names, owners, strict=True)), split, together


def test_a_llamas_largest_unit_does_not_limit_it() -> None:
    owners, split, whole = llama(layers=8, ranks=51, block=16)
    assert whole > 3
    assert split < 1.7
    for i in range(8):
        assert owners[f"layers.{i}.mlp.gate.weight"] != owners[f"layers.{i}.mlp.up.weight"]
        attention = [owners[f"layers.{i}.attention.{name}.weight"] for name in "qkvo"]
        assert len(set(attention)) == 1, "units that fit a rank stay together"


def test_units_stay_together_where_ranks_are_few() -> None:
    owners, split, whole = llama(layers=8, ranks=4, block=16)
    assert split <= whole < 1.1
    for i in range(8):
        assert owners[f"layers.{i}.mlp.gate.weight"] == owners[f"layers.{i}.mlp.up.weight"]


def test_a_root_that_every_part_must_take_speaks_against_a_split() -> None:
    """k and v with few outputs: nearly all their work is the root of A, which a split repeats."""
    names = ["a.k.weight", "a.v.weight"]
    wide = [(1, 8, 512)] * 2
    both = [[(1, 8), (1, 512)]] * 2
    assert owners_of(names, wide, 1, 2, together=True, maps=both) == [0, 0]
    only = [[(1, 8), (0, 0)]] * 2
    assert owners_of(names, wide, 1, 2, together=True, maps=only) == [0, 1]


# ---- what is sent ---------------------------------------------------------------------------


@given(st.integers(0, 60), st.integers(1, 12))
def test_shards_are_torchs_chunks(rows: int, shards: int) -> None:
    chunks = [len(part) for part in torch.empty(rows, 2).chunk(shards)] if rows else []
    assert shard_rows(rows, shards) == chunks + [0] * (shards - len(chunks))


# One 5×3 weight with its factors of side 3 and 5, and one 4×2 weight without.
UNITS = [Unit(("a",), (TensorPart(5, 3),), (9, 25)), Unit(("b",), (TensorPart(4, 2),))]
COUNTS = 2 * 2 * 8  # two float64 beside each of the two moments
STREAM = 6 * 8  # six float64 to each other rank, where moments are sent in the backward pass
FACTOR = 8  # a float64 with every tensor of a step


def test_status_is_a_few_numbers_and_coupled_layers_need_two_messages_more() -> None:
    assert status_bytes(3) == 6 * 8 * 2
    assert status_bytes(3, groups=2) == 7 * 8 * 2
    assert status_bytes(2, coupled=True) == 7 * 8 + 8
    assert status_bytes(1, coupled=True) == 0


def test_with_replicas_only_owners_send_whole_steps() -> None:
    mesh, status = Mesh(replicas=3), status_bytes(3)
    steps = [2 * (15 * 4 + FACTOR), 2 * (8 * 4 + FACTOR)]
    assert step_bytes(UNITS, [1, 2], mesh, refresh=False) == [
        status,
        status + steps[0],
        status + steps[1],
    ]
    moments = 34 * 4 + COUNTS
    assert step_bytes(UNITS, [1, 2], mesh, refresh=True) == [
        status + 2 * STREAM + moments,
        status + 2 * STREAM + steps[0],
        status + 2 * STREAM + steps[1] + moments,
    ]


def test_with_shards_only_rows_travel() -> None:
    # 5 rows on two shards are 3 and 2; 4 rows are 2 and 2.
    mesh, status = Mesh(shards=2), status_bytes(2)
    assert step_bytes(UNITS, [0, 1], mesh, refresh=False) == [
        status + 2 * 3 * 4 + FACTOR + 2 * 2 * 4,  # a's step to shard 1, b's gradient to shard 1
        status + 2 * 3 * 4 + 2 * 2 * 4 + FACTOR,  # a's gradient to shard 0, b's step to shard 0
    ]
    mixed = step_bytes(UNITS, [0, 1], mesh, refresh=True, gradient_size=2, working_size=4)
    assert mixed == [
        status + STREAM + 2 * 3 * 4 + FACTOR + 2 * 2 * 2,
        status + STREAM + 2 * 3 * 2 + 2 * 2 * 4 + FACTOR + 34 * 4 + COUNTS,
    ]


def test_a_hybrid_collects_within_a_replica_and_delivers_to_all() -> None:
    # Ranks 0 1 | 2 3. Rank 2 owns a: rank 3 sends its two rows; 0, 1 and 3 receive theirs.
    mesh, status = Mesh(replicas=2, shards=2), status_bytes(4)
    assert step_bytes(UNITS[:1], [2], mesh, refresh=False) == [
        status,
        status,
        status + (3 + 2 + 2) * 3 * 4 + 3 * FACTOR,
        status + 2 * 3 * 4,
    ]


def test_one_rank_sends_nothing() -> None:
    assert step_bytes(UNITS, [0, 0], Mesh(), refresh=True) == [0]
    assert replicated_bytes(UNITS, Mesh(), refresh=True) == [0]
    assert wrapper_bytes(100, Mesh(), weight_size=4, gradient_size=4) == 0


def test_replicated_work_reduces_moments_and_needs_whole_models() -> None:
    moments, status = 34 * 4 + COUNTS, status_bytes(2)
    assert replicated_bytes(UNITS, Mesh(replicas=2), refresh=True) == [status + moments] * 2
    assert replicated_bytes(UNITS, Mesh(replicas=2), refresh=False) == [status] * 2
    with pytest.raises(ValueError, match="2 shards"):
        replicated_bytes(UNITS, Mesh(shards=2), refresh=False)


def test_units_are_told_by_name_and_shape() -> None:
    names = ["blocks.0.attn.q.weight", "blocks.0.attn.k.weight", "blocks.0.mlp.up.weight",
             "blocks.0.mlp.down.weight", "layers.0.weight", "layers.1.weight", "top.weight",
             "other.weight"]  # fmt: skip
    units = siblings(names, [8, 8, 8, 24, 8, 8, 8, 8])
    assert units == [[0, 1], [2], [3], [4], [5], [6], [7]]
    shapes = [(1, 8, n) for n in (8, 8, 8, 24, 8, 8, 8, 8)]
    owners = owners_of(names, shapes, 4, 3, together=True)
    assert owners[0] == owners[1]
    assert set(owners) == {0, 1, 2}
    assert len(set(owners_of(names, shapes, 4, 8, together=False))) == 8


def test_what_the_wrappers_send() -> None:
    sizes = {"weight_size": 4, "gradient_size": 4}
    assert wrapper_bytes(1000, Mesh(replicas=4), **sizes) == 2 * 3 / 4 * 4000
    assert wrapper_bytes(1000, Mesh(shards=4), **sizes) == 3 * 3 / 4 * 4000
    assert wrapper_bytes(1000, Mesh(2, 4), **sizes) == 3 * 3 / 4 * 4000 + 1000


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 9)), min_size=1, max_size=5),
    st.integers(1, 3),
    st.integers(1, 4),
)
def test_what_is_sent_is_what_must_arrive(
    shapes: list[tuple[int, int]], replicas: int, shards: int
) -> None:
    """Summed over ranks: each replica's missing steps, the gradients an owner lacks."""
    mesh = Mesh(replicas, shards)
    units = [Unit((str(i),), (TensorPart(*shape),)) for i, shape in enumerate(shapes)]
    owners = assign([1.0] * len(units), mesh.ranks)
    sent = sum(step_bytes(units, owners, mesh, refresh=False))
    expected = mesh.ranks * status_bytes(mesh.ranks)
    for (rows, width), owner in zip(shapes, owners, strict=True):
        own = shard_rows(rows, shards)[owner % shards]
        expected += 4 * width * (replicas * rows - own) + FACTOR * (mesh.ranks - 1)
        expected += 4 * width * (rows - own) * (shards > 1)
    assert sent == expected
