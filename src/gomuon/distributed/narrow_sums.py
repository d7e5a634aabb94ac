"""Captured sums that travel in bfloat16 and are added up in float32.

A reduce in bfloat16 would round every partial sum. Here each rank's part is rounded once, arrives,
and is added in the dtype of the sum, in the order of the ranks. With few ranks the owner adds up
all parts itself. It would have to receive and hold as many parts as there are ranks, so with more
ranks every rank adds up an equal *slice* of each sum, and the owner collects the slices in the
step, in full precision. Both give the same sum.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from gomuon.distributed.messages import Exchange, size_of
from gomuon.distributed.ranks import Ranks
from gomuon.distributed.sums import Slot

OWNER_ADDS = 4


def owner_adds(ranks: int) -> bool:
    """Whether the owner adds up all parts itself."""
    return ranks <= OWNER_ADDS


def slice_of(rank: int, numbers: int, owner: int, ranks: int) -> int:
    """How many of a sum's numbers a rank adds up."""
    if owner_adds(ranks):
        return numbers if rank == owner else 0
    return numbers // ranks + (rank < numbers % ranks)


def _slices(slot: Slot, ranks: Ranks) -> list[int]:
    assert slot.owner is not None
    return [slice_of(rank, slot.numbers, slot.owner, ranks.size) for rank in range(ranks.size)]


class NarrowMessage:
    """Parts of the sums of one bucket on their way to the ranks that add them up.

    Args:
        slots: the sums.
        numbers: this rank's parts of them, one after the other.
        ranks: the ranks that work together.
        group: the process group of the message.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        numbers: Tensor,
        ranks: Ranks,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._slots = slots
        cuts = [_slices(slot, ranks) for slot in slots]
        pieces = [
            part.split(cut)
            for part, cut in zip(numbers.split([s.numbers for s in slots]), cuts, strict=True)
        ]
        outgoing = [[piece[rank] for piece in pieces] for rank in range(ranks.size)]
        self._own = [cut[ranks.rank] for cut in cuts]
        incoming = [size_of((sum(self._own),), numbers.dtype)] * ranks.size
        self._exchange = Exchange(group, ranks.device, outgoing, incoming)

    @property
    def bytes_held(self) -> int:
        return self._exchange.bytes_held

    def is_completed(self) -> bool:
        return self._exchange.is_completed()

    def add_to(self, totals: dict[int, Tensor]) -> None:
        """Wait, and add what every rank sent to this rank's slices, by the id of their slot."""
        for inbox in self._exchange.wait():
            for slot, size in zip(self._slots, self._own, strict=True):
                part = inbox.take((size,), slot.travels_as)
                known = totals.get(id(slot))
                totals[id(slot)] = part.to(slot.dtype) if known is None else known.add_(part)


def collected(
    slots: Sequence[Slot], totals: Mapping[int, Tensor], ranks: Ranks
) -> dict[int, Tensor]:
    """Whole sums on their owners, from the slices that every rank added up.

    Args:
        slots: narrow sums that were sent; all ranks give the same ones.
        totals: this rank's slices, by the id of their slot.
        ranks: the ranks that work together.
    """
    outgoing: list[list[Tensor]] = [[] for _ in range(ranks.size)]
    incoming = [0] * ranks.size
    for slot in slots:
        assert slot.owner is not None
        outgoing[slot.owner].append(totals[id(slot)])
        if slot.owner == ranks.rank:
            for rank, size in enumerate(_slices(slot, ranks)):
                incoming[rank] += size_of((size,), slot.dtype)
    inboxes = ranks.start_exchange(outgoing, incoming).wait()
    return {
        id(slot): torch.cat(
            [
                inbox.take((size,), slot.dtype)
                for inbox, size in zip(inboxes, _slices(slot, ranks), strict=True)
            ]
        )
        for slot in slots
        if slot.owner == ranks.rank
    }
