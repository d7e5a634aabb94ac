"""The ranks that train a model, and collective messages between them."""

import zlib
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from gomuon.distributed.messages import Exchange, explained_failure
from gomuon.errors import RankError, describe_exception

NOTHING_CHANGED = "No weight was changed in this step on any rank"
WEIGHTS_MAY_DIFFER = "Weights may have moved on some ranks; continue from the last checkpoint"


class Ranks:
    """A process group, seen from one of its ranks."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.group = group
        self.device = device
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)

    def number_of(self, global_rank: int) -> int:
        """The rank in this group of a global rank."""
        return global_rank if self.group is None else dist.get_group_rank(self.group, global_rank)

    def global_rank(self, rank: int) -> int:
        """The global rank of a rank in this group."""
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def new_group(self) -> dist.ProcessGroup:
        """Another process group of the same ranks, made by all of them at the same time."""
        group: Any = self.group or dist.group.WORLD
        options = getattr(group._get_backend(self.device), "options", None)
        made: dist.ProcessGroup = dist.new_group(
            dist.get_process_group_ranks(group),
            timeout=getattr(options, "_timeout", None),  # otherwise not the user's
            use_local_synchronization=True,
        )
        return made

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """The numbers of all ranks, by rank."""
        mine = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        all_of_them = [torch.empty_like(mine) for _ in range(self.size)]
        with explained_failure():
            dist.all_gather(all_of_them, mine, group=self.group)
        table: list[list[float]] = torch.stack(all_of_them).tolist()
        return table

    def total(self, value: Tensor) -> Tensor:
        """The sum of a value over all ranks."""
        # In float64: a rank without matrices has nothing whose dtype it could take.
        value = value.to(self.device, torch.float64, copy=True)
        self.sum_in_place(value)
        return value

    def sum_in_place(self, value: Tensor) -> None:
        """Replace each rank's value by the sum over all ranks."""
        with explained_failure():
            dist.all_reduce(value, group=self.group)

    def largest_in_place(self, value: Tensor) -> None:
        """Replace each rank's value by the largest over all ranks."""
        with explained_failure():
            dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self.group)

    def gather_objects(self, mine: object) -> list[object]:
        """The objects of all ranks, by rank. Slow: only for small objects and rare calls."""
        everyone: list[object] = [None] * self.size
        with explained_failure():
            dist.all_gather_object(everyone, mine, group=self.group)
        return everyone

    def gather_lists(self, mine: list[Any]) -> list[Any]:
        """The lists of all ranks, one after the other. For few and small objects."""
        return [item for theirs in self.gather_objects(mine) for item in cast(list[Any], theirs)]

    def gather_objects_on(self, to: int, mine: object) -> list[object]:
        """As `gather_objects`, but only rank `to` gets the objects; others get an empty list."""
        everyone: list[object] = [None] * self.size if self.rank == to else []
        target = to if self.group is None else dist.get_global_rank(self.group, to)
        with explained_failure():
            dist.gather_object(mine, everyone or None, dst=target, group=self.group)
        return everyone

    def exchange_status(
        self, failure: Exception | None = None, *numbers: float, consequence: str = NOTHING_CHANGED
    ) -> list[list[float]]:
        """The numbers of all ranks. Raises on all ranks if one of them has failed.

        Call it before every message, so that no rank waits for a message that never comes.
        `consequence` tells the other ranks what the failure means for their weights.
        """
        table = self.gather([failure is not None, *numbers])
        failed = [rank for rank, row in enumerate(table) if row[0]]
        if not failed:
            return [row[1:] for row in table]
        reasons = self.gather_objects(None if failure is None else describe_exception(failure))
        if failure is not None:
            failure.add_note(f"on rank {self.rank}; the other ranks raise a RankError")
            raise failure
        raise RankError(
            f"rank {failed[0]} failed in the optimizer's step: {reasons[failed[0]]}. {consequence}"
        )

    def start_exchange(
        self, outgoing: Sequence[Sequence[Tensor]], incoming: Sequence[int]
    ) -> Exchange:
        """Start sending tensors to each rank and receiving `incoming` bytes from each."""
        return Exchange(self.group, self.device, outgoing, incoming)


def checksum(value: object) -> float:
    """A number that differs for different values; exact in float64."""
    return float(zlib.crc32(repr(value).encode()))


def check_group(group: object) -> None:
    """Raise a ValueError unless `group` is a process group or None."""
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            "process_group must be a process group of torch.distributed, or None for the default "
            f"group, got {group!r}"
        )
