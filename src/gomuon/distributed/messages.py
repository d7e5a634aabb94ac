"""Sends tensors between ranks as bytes: one message for each pair of ranks."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from gomuon.errors import RankError


class Exchange:
    """A running exchange of tensors between all ranks.

    Args:
        group: the process group.
        device: the device of the message buffers.
        outgoing: the tensors to send to each rank.
        incoming: the number of bytes to receive from each rank.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        outgoing: Sequence[Sequence[Tensor]],
        incoming: Sequence[int],
    ) -> None:
        parts = [_bytes(tensor) for tensors in outgoing for tensor in tensors]
        sizes = [sum(t.numel() * t.element_size() for t in tensors) for tensors in outgoing]
        empty = torch.empty(0, dtype=torch.uint8, device=device)
        self._sent = torch.cat([empty, *parts])
        self._sizes = list(incoming)
        self._buffer = torch.empty(sum(incoming), dtype=torch.uint8, device=device)
        with explained_failure():
            self._work = dist.all_to_all_single(
                self._buffer, self._sent, self._sizes, sizes, group=group, async_op=True
            )

    @property
    def bytes_held(self) -> int:
        """Bytes of its buffers."""
        return self._sent.numel() + self._buffer.numel()

    def is_completed(self) -> bool:
        """Whether the exchange has ended."""
        return bool(self._work.is_completed())

    def wait(self) -> list["Inbox"]:
        """Wait until the exchange has ended; returns the received bytes, by rank."""
        with explained_failure():
            self._work.wait()
        return [Inbox(part) for part in self._buffer.split(self._sizes)]


class Inbox:
    """The bytes received from one rank. Read them in the order in which they were sent."""

    def __init__(self, buffer: Tensor) -> None:
        self._buffer = buffer
        self._read = 0

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The next tensor, of this shape and dtype."""
        size = size_of(shape, dtype)
        part = self._buffer[self._read : self._read + size]
        self._read += size
        # A copy, because the data must be aligned for its dtype.
        return part.clone().view(dtype).view(tuple(shape))


def size_of(shape: Sequence[int], dtype: torch.dtype) -> int:
    """The number of bytes of a dense tensor."""
    return torch.Size(shape).numel() * dtype.itemsize


def _bytes(tensor: Tensor) -> Tensor:
    # A single element is contiguous with any stride, but only bytes side by side can be viewed.
    flat = tensor.detach().contiguous().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8)


@contextmanager
def explained_failure() -> Iterator[None]:
    """Turn an error of the backend into a RankError that says what to do."""
    try:
        yield
    except (RuntimeError, ValueError) as failure:
        raise RankError(
            "a message between ranks failed in the optimizer's step: a rank has died, or did not "
            "arrive within the process group's time-out. The step is incomplete; continue from the "
            f"last checkpoint. The backend says: {failure}"
        ) from failure
