"""Bytes that leave each rank in a step, when every unit of matrices has one owner.

    gradients   every rank of the owner's replica → the owner      its part, if divided
    weights     as gradients, for methods that read whole weights
    moments     every rank → the owner                             in backward, on refresh steps;
                                                                   see `narrow_message` for bfloat16
    steps       the owner → every rank                             the part that rank holds
    rows        every rank → those that divide a layer with it     in backward, on refresh steps;
                                                                   see `lab/costs/exchange.py`
    status      every rank → every rank                            a few numbers, so that all agree

What a rank keeps for itself is not sent. AdamW's parameters are updated where they lie. The
gradients' and parameters' own travel in DDP or FSDP2 is the wrapper's: see `wrapper_bytes`. The
tests hold these figures to what goes through a process group.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gomuon.distributed.assignment import TensorPart, Unit, load_per_rank
from gomuon.distributed.narrow_sums import owner_adds, slice_of
from gomuon.distributed.shards import shard_rows

WIDE = 8  # bytes of a float64
STATUS_NUMBERS = 5  # float64, from each rank to each other, before a step
# float64, from each rank to each other, on refresh steps: what was sent in the backward pass.
STREAM_NUMBERS = 6
FACTOR = WIDE  # of the old weights, beside each tensor of a step


class Place(NamedTuple):
    """A rank's coordinates in a mesh."""

    replica: int
    shard: int
    part: int


@dataclass(frozen=True)
class Mesh:
    """Ranks as replicas × shards × parts.

    DDP has one shard, FSDP2 one replica, hybrids have both. Tensor parallelism divides each layer
    into parts. Ranks are numbered replica by replica, and in these shard by shard.
    """

    replicas: int = 1
    shards: int = 1
    parts: int = 1

    def __post_init__(self) -> None:
        if min(self.replicas, self.shards, self.parts) < 1:
            raise ValueError(
                "a mesh needs replicas, shards and parts >= 1, got "
                f"{self.replicas} × {self.shards} × {self.parts}"
            )

    @property
    def ranks(self) -> int:
        return self.replicas * self.shards * self.parts

    @property
    def places(self) -> list[Place]:
        """The coordinates of every rank."""
        return [self.place(rank) for rank in range(self.ranks)]

    def place(self, rank: int) -> Place:
        rest, part = divmod(rank, self.parts)
        return Place(*divmod(rest, self.shards), part)

    def rank(self, place: Place) -> int:
        return (place.replica * self.shards + place.shard) * self.parts + place.part


def held_elements(tensors: Sequence[TensorPart], shards: int) -> list[int]:
    """Elements of these parameters on each shard."""
    held = [0] * shards
    for tensor in tensors:
        for shard, count in enumerate(shard_rows(tensor.rows, shards)):
            held[shard] += count * tensor.width
    return held


def senders(tensor: TensorPart, owner: int, mesh: Mesh) -> Iterator[tuple[int, int]]:
    """The other ranks from which an owner collects a parameter, and the elements of each."""
    own = mesh.place(owner)
    parts = range(mesh.parts) if tensor.parts > 1 else [own.part]
    for shard, elements in enumerate(held_elements([tensor], mesh.shards)):
        for part in parts:
            rank = mesh.rank(Place(own.replica, shard, part))
            if rank != owner:
                yield rank, elements


def reduced_bytes(size: float, ranks: int) -> int:
    """What a rank of a ring sends to sum so many bytes over all ranks."""
    return round(2 * (ranks - 1) / ranks * size)


def status_bytes(ranks: int, groups: int = 1, coupled: bool = False) -> int:
    """What a rank sends in the small messages of a step.

    One before it, one after the work of each group with matrices, and, where trust couples the
    layers of a group, one more and a sum.
    """
    numbers = STATUS_NUMBERS + groups * (2 if coupled else 1)
    return numbers * WIDE * (ranks - 1) + groups * coupled * reduced_bytes(WIDE, ranks)


def moment_message(unit: Unit, moment_size: int) -> int:
    """Bytes of a unit's sums and of the counts beside them."""
    return sum(unit.moments) * moment_size + unit.numbers_of_rows * WIDE


def narrow_message(
    unit: Unit, owner: int, rank: int, ranks: int, moment_size: int, sums_size: int
) -> int:
    """Bytes that a rank sends for a unit's sums and counts, if numbers travel in fewer bytes.

    They go to the ranks that add them up; these send their slices to the owner in full. See
    `distributed/narrow_sums.py`.
    """
    sent = 0 if rank == owner else unit.numbers_of_rows * WIDE
    for numbers in unit.moments:
        own = slice_of(rank, numbers, owner, ranks)
        sent += (numbers - own) * sums_size
        sent += own * moment_size if rank != owner else 0
    return sent


def sums_in_messages(ranks: int, moment_size: int, sums_size: int) -> int:
    """Bytes that a rank holds at most for each number of a message of sums, sent and received."""
    if sums_size == moment_size:
        return moment_size
    return sums_size * (1 + (ranks if owner_adds(ranks) else 1))


def step_bytes(
    units: Sequence[Unit],
    owners: Sequence[int],
    mesh: Mesh,
    *,
    refresh: bool,
    groups: int = 1,
    gradient_size: int = 4,
    weight_size: int = 0,
    working_size: int = 4,
    sums_size: int | None = None,
    coupled: bool = False,
) -> list[int]:
    """Bytes each rank sends in one step.

    Args:
        units: what is owned.
        owners: the rank of each unit.
        mesh: the ranks that share the work.
        refresh: whether captured moments travel in this step.
        groups: parameter groups with matrices.
        gradient_size: bytes of an element of a gradient.
        weight_size: bytes of an element of a weight; 0 if the owner needs no whole weights.
        working_size: bytes of an element of a moment or a step: float32, or float64 for float64.
        sums_size: bytes of an element of a moment on its way; None: of `working_size`.
        coupled: whether trust sums over the group, as K-FAC's does.
    """
    sent = [status_bytes(mesh.ranks, groups, coupled)] * mesh.ranks
    places = mesh.places
    for unit, owner in zip(units, owners, strict=True):
        held = held_elements(unit.tensors, mesh.shards)
        others = sum(held[place.shard] for place in places) - held[places[owner].shard]
        sent[owner] += others * working_size + (mesh.ranks - 1) * len(unit.tensors) * FACTOR
        for tensor in unit.tensors:
            for rank, elements in senders(tensor, owner, mesh):
                sent[rank] += elements * (gradient_size + weight_size)
    if not refresh:
        return sent
    narrow = working_size if sums_size is None else sums_size
    moments = moment_bytes(units, owners, mesh.ranks, working_size, narrow)
    return [a + b for a, b in zip(sent, moments, strict=True)]


def moment_bytes(
    units: Sequence[Unit], owners: Sequence[int], ranks: int, moment_size: int, sums_size: int
) -> list[int]:
    """Bytes each rank sends in a step in which the captured moments of these units travel."""
    captured = any(unit.moments for unit in units)
    small = STREAM_NUMBERS * WIDE * (ranks - 1) if captured else 0
    if sums_size == moment_size:
        own = load_per_rank([moment_message(unit, moment_size) for unit in units], owners, ranks)
        return [small + round(sum(own) - kept) for kept in own]
    return [
        small
        + sum(
            narrow_message(unit, owner, rank, ranks, moment_size, sums_size)
            for unit, owner in zip(units, owners, strict=True)
        )
        for rank in range(ranks)
    ]


def step_memory(
    units: Sequence[Unit],
    owners: Sequence[int],
    mesh: Mesh,
    *,
    gradient_size: int = 4,
    weight_size: int = 0,
    working_size: int = 4,
) -> list[int]:
    """Bytes each rank holds while steps are sent; the arguments are those of `step_bytes`.

    One buffer with everything it sends, its own rows included, and one with everything it receives.
    An owner also holds its whole steps and, if parameters are divided, the whole gradients and
    weights that it collected.
    """
    held = [0] * mesh.ranks
    # The owners of a group collect either all of its gradients or, if they have them whole, none.
    collecting = {
        unit.group
        for unit in units
        if mesh.shards > 1 or any(tensor.parts > 1 for tensor in unit.tensors)
    }
    places = mesh.places
    for unit, owner in zip(units, owners, strict=True):
        rows = held_elements(unit.tensors, mesh.shards)
        messages = [rows[place.shard] * working_size for place in places]
        for rank, message in enumerate(messages):
            held[rank] += message + len(unit.tensors) * FACTOR
        held[owner] += sum(messages) + mesh.ranks * len(unit.tensors) * FACTOR
        collected = gradient_size + weight_size if unit.group in collecting else 0
        held[owner] += sum(x.elements for x in unit.tensors) * (working_size + collected)
    return held


def replicated_bytes(
    units: Sequence[Unit], mesh: Mesh, *, refresh: bool, moment_size: int = 4, groups: int = 1
) -> list[int]:
    """Bytes each rank sends where every rank does all the work, which only whole models allow.

    Moments are all-reduced; before and after the work all ranks agree, as where it is shared.
    """
    if mesh.shards > 1:
        raise ValueError(f"work cannot be replicated on {mesh.shards} shards of a model")
    moments = sum(moment_message(unit, moment_size) for unit in units) if refresh else 0
    return [status_bytes(mesh.ranks, groups) + reduced_bytes(moments, mesh.ranks)] * mesh.ranks


def wrapper_bytes(parameters: int, mesh: Mesh, *, weight_size: int, gradient_size: int) -> int:
    """Bytes a rank sends for DDP or FSDP2 itself, with ring collectives.

    FSDP2 gathers parameters for the forward and again for the backward pass and scatters gradients,
    (S−1)/S of each; replicas all-reduce what they hold, 2(P−1)/P of it.
    """
    shards, replicas = mesh.shards, mesh.replicas
    sharded = (shards - 1) / shards * parameters * (2 * weight_size + gradient_size)
    reduced = 2 * (replicas - 1) / replicas * parameters / shards * gradient_size
    return round(sharded + reduced)
