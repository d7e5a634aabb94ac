"""The ranks a model is trained on, and the messages between all of them."""

import zlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from gomuon.distributed.messages import Swap, explained_failure
from gomuon.errors import RankError, told

UNTOUCHED = "No weight was changed in this step on any rank"
MOVED = "Weights may have moved on some ranks; go on from the last checkpoint"


class Ranks:
    """A process group, seen from one of its ranks."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.group = group
        self.device = device
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)

    def number_of(self, global_rank: int) -> int:
        """The number in this group of a rank of the whole world."""
        return global_rank if self.group is None else dist.get_group_rank(self.group, global_rank)

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """The numbers of every rank, by rank."""
        mine = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        all_of_them = [torch.empty_like(mine) for _ in range(self.size)]
        with explained_failure():
            dist.all_gather(all_of_them, mine, group=self.group)
        table: list[list[float]] = torch.stack(all_of_them).tolist()
        return table

    def total(self, value: Tensor) -> Tensor:
        """The sum over the ranks."""
        value = value.to(self.device, copy=True)
        self.add_up(value)
        return value

    def add_up(self, value: Tensor) -> None:
        """Replace each rank's value by the sum over the ranks."""
        with explained_failure():
            dist.all_reduce(value, group=self.group)

    def objects(self, mine: object) -> list[object]:
        """The object of every rank, by rank; for rare and small things."""
        everyone: list[object] = [None] * self.size
        with explained_failure():
            dist.all_gather_object(everyone, mine, group=self.group)
        return everyone

    def agree(
        self, failure: Exception | None = None, *numbers: float, left: str = UNTOUCHED
    ) -> list[list[float]]:
        """The numbers of every rank; raises on all ranks if one of them has failed.

        Called before every message, so that no rank waits for one that will not come. `left` says
        what a failure leaves behind.
        """
        table = self.gather([failure is not None, *numbers])
        failed = [rank for rank, row in enumerate(table) if row[0]]
        if not failed:
            return [row[1:] for row in table]
        reasons = self.objects(None if failure is None else told(failure))
        if failure is not None:
            failure.add_note(f"on rank {self.rank}; the other ranks were told")
            raise failure
        raise RankError(
            f"rank {failed[0]} failed in the optimizer's step: {reasons[failed[0]]}. {left}"
        )

    def swap(self, outgoing: Sequence[Sequence[Tensor]], incoming: Sequence[int]) -> Swap:
        """Start sending tensors to each rank and receiving `incoming` bytes from each."""
        return Swap(self.group, self.device, outgoing, incoming)


def checksum(value: object) -> float:
    """A number that differs for different plain objects; exact in float64."""
    return float(zlib.crc32(repr(value).encode()))


def check_group(group: object) -> None:
    """Raise a ValueError unless it is a process group or None."""
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            "process_group must be a group of torch.distributed, or None for the default one, got "
            f"{group!r}"
        )
