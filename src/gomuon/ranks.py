"""The ranks a model is trained on, and how they talk: few messages, and agreement before each."""

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

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
        """Everybody's numbers, by rank."""
        mine = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        all_of_them = [torch.empty_like(mine) for _ in range(self.size)]
        with _named_failure():
            dist.all_gather(all_of_them, mine, group=self.group)
        table: list[list[float]] = torch.stack(all_of_them).tolist()
        return table

    def total(self, value: Tensor) -> Tensor:
        """The sum over the ranks."""
        value = value.to(self.device, copy=True)
        self.add_up(value)
        return value

    def add_up(self, value: Tensor) -> None:
        """Put the sum over the ranks in the place of each rank's part."""
        with _named_failure():
            dist.all_reduce(value, group=self.group)

    def objects(self, mine: object) -> list[object]:
        """Everybody's object, by rank; for what is rare and small."""
        everyone: list[object] = [None] * self.size
        with _named_failure():
            dist.all_gather_object(everyone, mine, group=self.group)
        return everyone

    def agree(
        self, failure: Exception | None = None, *numbers: float, left: str = UNTOUCHED
    ) -> list[list[float]]:
        """Everybody's numbers; or raise on every rank when one of them has failed.

        Called before every message, so that nobody waits for a rank that will not come. `left` says
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

    def swap(self, outgoing: Sequence[Sequence[Tensor]], incoming: Sequence[int]) -> "Swap":
        """Send tensors to each rank, and receive so many bytes of each; one message a pair."""
        return Swap(self, outgoing, incoming)


class Swap:
    """An exchange under way."""

    def __init__(
        self, ranks: Ranks, outgoing: Sequence[Sequence[Tensor]], incoming: Sequence[int]
    ) -> None:
        parts = [_bytes(tensor) for tensors in outgoing for tensor in tensors]
        sizes = [sum(t.numel() * t.element_size() for t in tensors) for tensors in outgoing]
        empty = torch.empty(0, dtype=torch.uint8, device=ranks.device)
        self._sent = torch.cat([empty, *parts])
        self._sizes = list(incoming)
        self._buffer = torch.empty(sum(incoming), dtype=torch.uint8, device=ranks.device)
        with _named_failure():
            self._work = dist.all_to_all_single(
                self._buffer, self._sent, self._sizes, sizes, group=ranks.group, async_op=True
            )

    def wait(self) -> list["Inbox"]:
        """What came, by rank."""
        with _named_failure():
            self._work.wait()
        return [Inbox(part) for part in self._buffer.split(self._sizes)]


class Inbox:
    """Bytes from one rank, read in the order they were written."""

    def __init__(self, buffer: Tensor) -> None:
        self._buffer = buffer
        self._read = 0

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        size = size_of(shape, dtype)
        part = self._buffer[self._read : self._read + size]
        self._read += size
        # A tensor of wider elements may not begin at any byte.
        return part.clone().view(dtype).view(tuple(shape))


def size_of(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes of a dense tensor."""
    return torch.Size(shape).numel() * dtype.itemsize


def checksum(value: object) -> float:
    """A number that tells two plain objects apart, exact in float64."""
    return float(zlib.crc32(repr(value).encode()))


def check_group(group: object) -> None:
    """Raise a ValueError for what is no process group."""
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            "process_group must be a group of torch.distributed, or None for the default one, got "
            f"{group!r}"
        )


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


@contextmanager
def _named_failure() -> Iterator[None]:
    """A backend's failure as one that says what it means for the optimizer."""
    try:
        yield
    except (RuntimeError, ValueError) as failure:
        raise RankError(
            "a message between ranks failed in the optimizer's step: a rank has died, or did not "
            "arrive within the process group's time-out. The step is incomplete; go on from the "
            f"last checkpoint. The backend says: {failure}"
        ) from failure
