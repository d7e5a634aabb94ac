"""Sends captured sums to their owners during the backward pass, and frees them.

All ranks send the same sequence of messages: bucket 0, 1, … of the layout, then bucket 0 again, and
so on. A rank sends the next bucket when its sums have arrived. Whatever is still here at the step
is sent then. Ranks that are behind catch up there, with zeros for what they do not have. So each
part of a sum is sent exactly once, and messages match in whatever order autograd works. Nothing in
the backward pass waits for another rank, so ranks cannot block each other there.

Messages have a process group of their own: those of DDP and FSDP2 are sent at the same time.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from gomuon.capture.group import GroupCapture
from gomuon.capture.model import ModelCapture
from gomuon.distributed.messages import explained_failure, size_of
from gomuon.distributed.narrow_sums import NarrowMessage, collected, owner_adds
from gomuon.distributed.ranks import Ranks, checksum
from gomuon.distributed.stream_layout import Bucket, StreamUnit, buckets_of, description, key_of
from gomuon.distributed.sums import Slot, moments_at_owner, statistics_of
from gomuon.distributed.team import Captured, LocalCheck
from gomuon.functional.triangles import packed, unpacked
from gomuon.moments import Moment, Statistics, stacked_counts

NOTHING = Statistics(None, None)
# A unit's parts by slot, the divisor of its Σδδᵀ, and a function that frees them.
Taken = tuple[list[Moment | None], float, Callable[[], None]]


@dataclass(frozen=True)
class Message:
    """Sums of one bucket on their way to one owner, added up on the way."""

    slots: list[Slot]
    numbers: Tensor
    work: dist.Work
    is_owner: bool

    @property
    def bytes_held(self) -> int:
        return size_of(self.numbers.shape, self.numbers.dtype)

    def is_completed(self) -> bool:
        return bool(self.work.is_completed())

    def add_to(self, totals: dict[int, Tensor]) -> None:
        """Wait, and add what was received on the owner, by the id of the slot."""
        with explained_failure():
            self.work.wait()
        if not self.is_owner:
            return
        pieces = self.numbers.split([slot.numbers for slot in self.slots])
        for slot, piece in zip(self.slots, pieces, strict=True):
            known = totals.get(id(slot))
            totals[id(slot)] = piece if known is None else known.add_(piece)


class SumStream:
    """The sums of one optimizer's backward passes, on their way to their owners.

    Args:
        ranks: the ranks that work together. All of them make their stream at the same time.
        averaged: the number of ranks whose gradients are averaged.
        capture: the capture of the model.
        owners: returns the owner of each matrix.
        is_last: whether gradients of the running backward pass are averaged over the ranks. If not,
            more micro-batches follow, and their sums are added up here first.
    """

    def __init__(
        self,
        ranks: Ranks,
        averaged: int,
        capture: ModelCapture,
        owners: Callable[[], Mapping[Tensor, int]],
        is_last: Callable[[], bool],
    ) -> None:
        self._ranks = ranks
        self._averaged = averaged
        self._group = ranks.new_group()
        self._capture = capture
        self._owners = owners
        self._is_last = is_last
        self._lock = threading.RLock()  # leaves on other devices have other autograd threads
        self._begin()

    def _begin(self) -> None:
        """Forget everything about the last step."""
        self.failure: Exception | None = None
        self.sent = 0  # the number of buckets
        self.received: Mapping[Tensor, Statistics] | None = None  # for this rank's matrices
        self.residue = False
        self._buckets: list[Bucket] = []
        self._messages: list[Message | NarrowMessage] = []
        self._opening: tuple[list[Tensor], dist.Work] | None = None
        self._agreed: bool | None = None
        self._epoch = self._capture.epoch
        self._divisor = 1.0  # of Σδδᵀ
        self._left: set[int] = set()  # ids of units that must wait for the step
        self._totals: dict[int, Tensor] = {}  # of own slots, or slices, by the slot's id
        self._counts: dict[int, Tensor] = {}  # of this rank's parts, by the slot's id

    @property
    def bytes_in_flight(self) -> int:
        """Bytes of the messages that have not been finished."""
        return sum(message.bytes_held for message in self._messages)

    # ---- in the backward pass --------------------------------------------------------------------

    @torch.no_grad()
    def advance(self) -> bool:
        """Send the buckets whose turn it is and whose sums have arrived. Never waits.

        Returns whether no micro-batch is known to follow.
        """
        with self._lock:
            last = self._is_last()
            if self.failure is not None or self._is_void or self._capture.paused:
                return last
            try:
                if last and self._may_send():
                    while (end := self._end_of_arrived()) is not None:
                        while self.sent < end:
                            self._send(self._take)
                    self._finish_messages(wait=False)
            except Exception as failure:  # the step tells it to all ranks
                self.failure = failure
            return last

    @property
    def _is_void(self) -> bool:
        """Whether what was sent in this step belongs to gradients or hooks that are gone."""
        return self._capture.dropped or (
            self._opening is not None and self._epoch != self._capture.epoch
        )

    def _may_send(self) -> bool:
        """Whether all ranks are known to have the same layout."""
        if self._opening is None:
            self._open()
        assert self._opening is not None
        if self._agreed is None and self._opening[1].is_completed():
            self._check_opening()
        return bool(self._agreed)

    def _open(self) -> None:
        """Make the layout and start to compare it with the others'."""
        if not self._buckets:
            self._buckets = buckets_of(self._capture, self._owners())
        self._epoch = self._capture.epoch
        self._divisor = (self._capture.loss_scale * self._averaged) ** 2
        mine = torch.tensor(
            [checksum(description(self._buckets))], dtype=torch.float64, device=self._ranks.device
        )
        everyone = [torch.empty_like(mine) for _ in range(self._ranks.size)]
        with explained_failure():
            work = dist.all_gather(everyone, mine, group=self._group, async_op=True)
        self._opening = everyone, work

    def _check_opening(self) -> None:
        assert self._opening is not None
        everyone, work = self._opening
        with explained_failure():
            work.wait()
        self._agreed = len(set(torch.cat(everyone).tolist())) == 1 and bool(self._buckets)

    def _end_of_arrived(self) -> int | None:
        """The end of the buckets to send now; None if the next one has not arrived.

        Layers that no forward pass has used, and those whose sums must wait for the step, are
        passed over if a layer behind them has arrived.
        """
        number = len(self._buckets)
        for position in range(self.sent, (self.sent // number + 1) * number):
            bucket = self._buckets[position % number]
            units = [unit for unit in bucket.units if id(unit) not in self._left]
            if not all(self._of(unit).have_arrived(unit.parameters) for unit in units):
                return None
            if any(self._of(unit).were_called(unit.parameters) for unit in units):
                return position + 1
        return None

    def _of(self, unit: StreamUnit) -> GroupCapture:
        return self._capture.groups[unit.group]

    def _take(self, unit: StreamUnit) -> Taken:
        """A unit's parts out of the capture, the divisor of Σδδᵀ, and a function to free them."""
        group = self._of(unit)
        parts = unit.parts(group.collect(parameters=unit.parameters))
        if parts is None:
            self._left.add(id(unit))
            return [None] * len(unit.slots), 1.0, lambda: None
        return parts, self._divisor, lambda: group.release(unit.parameters)

    # ---- messages --------------------------------------------------------------------------------

    def _send(self, take: Callable[[StreamUnit], Taken]) -> None:
        """Send the next bucket."""
        bucket = self._buckets[self.sent % len(self._buckets)]
        device = self._ranks.device
        flat = {
            key: torch.zeros(
                sum(s.numbers for s in slots), dtype=slots[0].travels_as, device=device
            )
            for key, slots in bucket.messages.items()
        }
        places = dict.fromkeys(flat, 0)
        for unit in bucket.units:
            parts, divisor, release = take(unit)
            for slot, part in zip(unit.slots, parts, strict=True):
                key = key_of(slot)
                if part is not None:
                    place = flat[key][places[key] : places[key] + slot.numbers]
                    divides = slot.side == "gradients" and divisor != 1
                    if divides and slot.sent_as is not None:  # rounded once
                        place.copy_(packed(part.total) / divisor)
                    else:
                        place.copy_(packed(part.total))
                        if divides:
                            place.div_(divisor)
                    self._count(slot, part)
                places[key] += slot.numbers
            del parts
            release()
        self.sent += 1
        for key, slots in bucket.messages.items():
            self._messages.append(self._message(key[0], slots, flat.pop(key)))
        self._finish_messages(wait=False)

    def _message(self, owner: int, slots: list[Slot], numbers: Tensor) -> Message | NarrowMessage:
        """Start to send numbers."""
        if slots[0].sent_as is not None:
            return NarrowMessage(slots, numbers, self._ranks, self._group)
        with explained_failure():
            root = self._ranks.global_rank(owner)
            work = dist.reduce(numbers, root, group=self._group, async_op=True)
        return Message(slots, numbers, work, owner == self._ranks.rank)

    def _count(self, slot: Slot, part: Moment) -> None:
        counts = stacked_counts([part.count, part.uses])
        known = self._counts.get(id(slot))
        self._counts[id(slot)] = counts if known is None else known + counts

    def _finish_messages(self, *, wait: bool) -> None:
        """Free what has been sent, and add up what has been received, in order."""
        while self._messages and (wait or self._messages[0].is_completed()):
            self._messages.pop(0).add_to(self._totals)

    # ---- in the step -----------------------------------------------------------------------------

    def checked(self, check: LocalCheck) -> LocalCheck:
        """The check of this rank, which also raises what failed in its backward passes."""

        def both() -> tuple[str | None, Captured]:
            if self.failure is not None:
                raise self.failure
            return check()

        return both

    def finish(self, captured: Captured, *, keep: bool = True) -> Captured:
        """All ranks together: send the rest, and return what must be sent in another way.

        With `keep=False` everything that was sent is dropped.
        """
        with self._lock:
            try:
                return self._finished(captured, keep)
            finally:
                received, residue = self.received, self.residue
                self._begin()
                self._capture.forget_taken()
                self.received, self.residue = received, residue

    def _finished(self, captured: Captured, keep: bool) -> Captured:
        if not self._buckets:
            self._buckets = buckets_of(self._capture, self._owners())
        dropped = self._is_void or not keep
        needed, residue = (self.sent, False) if dropped else self._needed(captured)
        opened = self._opening is not None
        table = self._ranks.gather([opened, self.sent, needed, dropped, residue])
        self.received, self.residue = None, False
        if not any(row[0] for row in table):
            return captured
        if not opened:
            self._open()
        self._check_opening()
        if not self._agreed:
            return captured
        dropped = any(row[3] for row in table)
        rest = {index: dict(seen) for index, seen in captured.items()}

        def take_rest(unit: StreamUnit) -> Taken:
            seen = {} if dropped else rest[unit.group]
            parts = unit.parts(seen)
            if parts is None:
                return [None] * len(unit.slots), 1.0, lambda: None
            return parts, 1.0, lambda: seen.update(dict.fromkeys(unit.parameters, NOTHING))

        last = max(row[1 if dropped else 2] for row in table)
        while self.sent < last:
            self._send(take_rest)
        self._finish_messages(wait=True)
        if not dropped:
            self.residue = any(bool(row[4]) for row in table)
            self.received = self._statistics()
        return rest

    def _needed(self, captured: Captured) -> tuple[int, bool]:
        """The number of buckets until all sums are sent, and whether some cannot be sent so."""
        needed, residue, number = self.sent, False, len(self._buckets)
        for position in range(self.sent, self.sent + number):
            for unit in self._buckets[position % number].units:
                seen = captured.get(unit.group, {})
                if unit.has_data(seen):
                    needed = position + 1
                    residue |= unit.parts(seen) is None
        return needed, residue

    def _statistics(self) -> dict[Tensor, Statistics]:
        """The sums over all ranks of the matrices that this rank owns."""
        slots = _slots_of(self._buckets)
        if not owner_adds(self._ranks.size):
            sent = _slots_of(self._buckets[: self.sent])  # the same on all ranks
            narrow = [slot for slot in sent if slot.sent_as is not None]
            if narrow:
                self._totals |= collected(narrow, self._totals, self._ranks)
        own = self._ranks.rank
        totals = [self._totals.get(id(s)) if s.owner == own else None for s in slots]
        whole = [
            None if total is None else unpacked(total, slot.shape)
            for slot, total in zip(slots, totals, strict=True)
        ]
        counts = [self._counts.get(id(slot)) for slot in slots]
        return statistics_of(slots, moments_at_owner(slots, whole, counts, self._ranks))


def _slots_of(buckets: Sequence[Bucket]) -> list[Slot]:
    return [slot for bucket in buckets for unit in bucket.units for slot in unit.slots]
