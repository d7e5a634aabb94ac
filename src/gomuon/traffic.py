"""Bytes that leave each rank in a step, when every unit of matrices has one owner.

    gradients   every rank of the owner's replica → the owner      its rows, if sharded
    moments     every rank → the owner                             on refresh steps only
    weights     the owner → every rank                             the rows that rank holds
    status      every rank → every rank                            a few numbers, so that all agree

What a rank keeps for itself is not sent. AdamW's parameters are updated where they lie. The
gradients' and parameters' own travel in DDP or FSDP2 is the wrapper's: see `wrapper_bytes`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from gomuon.ownership import Unit

STATUS_NUMBERS = 4  # float64, from each rank to each other, every step
COUNTS = 3  # float64 beside each moment: rows, uses, times
WIDE = 8  # bytes of a float64


@dataclass(frozen=True)
class Mesh:
    """Ranks as replicas × shards: DDP has one shard, FSDP2 one replica, hybrids have both.

    Rank r is shard r mod `shards` of replica r div `shards`.
    """

    replicas: int = 1
    shards: int = 1

    def __post_init__(self) -> None:
        if self.replicas < 1 or self.shards < 1:
            raise ValueError(
                f"a mesh needs replicas and shards >= 1, got {self.replicas} × {self.shards}"
            )

    @property
    def ranks(self) -> int:
        return self.replicas * self.shards


def shard_rows(rows: int, shards: int) -> list[int]:
    """Rows of each shard, as torch.chunk and so DTensor's Shard(0) cut them."""
    size = -(-rows // shards)
    return [max(0, min(size, rows - size * shard)) for shard in range(shards)]


def held_elements(tensors: Sequence[tuple[int, int]], shards: int) -> list[int]:
    """Elements of these parameters on each shard."""
    held = [0] * shards
    for rows, width in tensors:
        for shard, count in enumerate(shard_rows(rows, shards)):
            held[shard] += count * width
    return held


def status_bytes(ranks: int) -> int:
    """What a rank sends in the small message of every step."""
    return STATUS_NUMBERS * WIDE * (ranks - 1)


def moment_message(unit: Unit, moment_size: int) -> int:
    """Bytes of a unit's sums and of the counts beside them."""
    return sum(unit.moments) * moment_size + len(unit.moments) * COUNTS * WIDE


def step_bytes(
    units: Sequence[Unit],
    owners: Sequence[int],
    mesh: Mesh,
    *,
    refresh: bool,
    weight_size: int = 4,
    gradient_size: int = 4,
    moment_size: int = 4,
) -> list[int]:
    """Bytes each rank sends in one step.

    Args:
        units: what is owned.
        owners: the rank of each unit.
        mesh: the ranks.
        refresh: whether captured moments travel in this step.
        weight_size: bytes of a weight.
        gradient_size: bytes of an element of a gradient.
        moment_size: bytes of an element of a moment.
    """
    sent = [status_bytes(mesh.ranks)] * mesh.ranks
    for unit, owner in zip(units, owners, strict=True):
        held = held_elements(unit.tensors, mesh.shards)
        replica = owner // mesh.shards
        for rank in range(mesh.ranks):
            if rank == owner:
                continue
            rows = held[rank % mesh.shards]
            sent[owner] += rows * weight_size
            # With one shard the owner's gradient is whole already.
            if mesh.shards > 1 and rank // mesh.shards == replica:
                sent[rank] += rows * gradient_size
            if refresh:
                sent[rank] += moment_message(unit, moment_size)
    return sent


def replicated_bytes(
    units: Sequence[Unit],
    mesh: Mesh,
    *,
    refresh: bool,
    gradient_size: int = 4,
    moment_size: int = 4,
) -> list[int]:
    """Bytes each rank sends where every rank does all the work.

    Moments are all-reduced, 2(R−1)/R of them leaving each rank of a ring; shards of gradients are
    gathered on every rank of their replica.
    """
    ranks, sent = mesh.ranks, []
    moments = sum(moment_message(unit, moment_size) for unit in units) if refresh else 0
    gradients = [0] * mesh.shards
    for unit in units:
        for shard, held in enumerate(held_elements(unit.tensors, mesh.shards)):
            gradients[shard] += held * gradient_size * (mesh.shards - 1)
    for rank in range(ranks):
        reduced = round(2 * (ranks - 1) / ranks * moments)
        sent.append(status_bytes(ranks) + reduced + gradients[rank % mesh.shards])
    return sent


def wrapper_bytes(parameters: int, mesh: Mesh, *, weight_size: int, gradient_size: int) -> int:
    """Bytes a rank sends for DDP or FSDP2 itself, with ring collectives.

    FSDP2 gathers parameters for the forward and again for the backward pass and scatters gradients,
    (S−1)/S of each; replicas all-reduce what they hold, 2(P−1)/P of it.
    """
    shards, replicas = mesh.shards, mesh.replicas
    sharded = (shards - 1) / shards * parameters * (2 * weight_size + gradient_size)
    reduced = 2 * (replicas - 1) / replicas * parameters / shards * gradient_size
    return round(sharded + reduced)
