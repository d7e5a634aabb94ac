"""Adds up captured sums over all ranks and sends them to each matrix's owner, or to every rank.

All ranks make the same slots in the same order. A rank with no data for a layer adds zeros. Sums
are symmetric, so they are sent and added up as triangles. With `sums_dtype="bfloat16"` ranks send
their parts in bfloat16; the owner adds them up in the dtype of the sum.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gomuon.distributed.messages import size_of
from gomuon.distributed.ranks import Ranks
from gomuon.functional.linalg import working_dtype
from gomuon.functional.triangles import packed, packed_size, unpacked
from gomuon.moments import (
    NOT_CAPTURED,
    Moment,
    MomentShapes,
    Shape,
    Statistics,
    count_dtype,
    stacked_counts,
)

SIDES = ("inputs", "gradients")


@dataclass(frozen=True)
class Slot:
    """One sum to send.

    Attributes:
        parameters: the parameters that use the sum; several if they read the same inputs.
        side: "inputs" or "gradients".
        owner: the rank that receives it; None if all ranks do.
        shape: the moment's shape.
        dtype: the moment's dtype.
        local_part: this rank's part; None if it has no data.
        counts: the shape of the two numbers of rows.
        sent_as: the dtype in which ranks send their parts; None: that of the moment.
    """

    parameters: list[Tensor]
    side: str
    owner: int | None
    shape: Shape
    dtype: torch.dtype
    local_part: Moment | None
    counts: Shape = (2,)
    sent_as: torch.dtype | None = None

    @property
    def travels_as(self) -> torch.dtype:
        """The dtype of what ranks send."""
        return self.dtype if self.sent_as is None else self.sent_as

    @property
    def numbers(self) -> int:
        """How many numbers are sent for the sum."""
        return packed_size(self.shape)


def slots_of(
    owners: Mapping[Tensor, int | None],
    seen: Mapping[Tensor, Statistics],
    wanted: Mapping[Tensor, MomentShapes],
    *,
    inputs_agree: bool,
) -> list[Slot]:
    """The sums to send, in the order of `owners`.

    `inputs_agree` says that all ranks agree on which layers read the same inputs. Then a shared
    input is sent once to each owner; otherwise the input of every layer is sent.
    """
    slots: list[Slot] = []
    leaders: dict[tuple[int, int | None], int] = {}
    for parameter, owner in owners.items():
        local_part = seen.get(parameter, Statistics(None, None))
        shapes = wanted.get(parameter, NOT_CAPTURED)
        for side in SIDES:
            shape: Shape | None = getattr(shapes, side)
            if shape is None:
                continue
            moment: Moment | None = getattr(local_part, side)
            if side == "inputs" and inputs_agree and moment is not None:
                leader = leaders.setdefault((id(moment), owner), len(slots))
                if leader < len(slots):
                    slots[leader].parameters.append(parameter)
                    continue
            dtype = working_dtype(parameter)
            counts, sent_as = shapes.counts, shapes.sent_as
            slots.append(Slot([parameter], side, owner, shape, dtype, moment, counts, sent_as))
    return slots


def sum_to_owners(slots: Sequence[Slot], ranks: Ranks) -> list[Moment | None]:
    """Each slot's sum on its owner; None on other ranks, and if no rank has data."""
    outgoing: list[list[Tensor]] = [[] for _ in range(ranks.size)]
    incoming = [0] * ranks.size
    for slot in slots:
        assert slot.owner is not None
        outgoing[slot.owner] += _parts(slot, ranks.device)
        if slot.owner == ranks.rank:
            each = size_of((slot.numbers,), slot.travels_as)
            each += size_of(slot.counts, count_dtype(ranks.device))
            incoming = [bytes_so_far + each for bytes_so_far in incoming]
    inboxes = ranks.start_exchange(outgoing, incoming).wait()
    totals: list[Tensor | None] = []
    counts: list[Tensor] = []
    for slot in slots:
        if slot.owner != ranks.rank:
            totals.append(None)
            continue
        parts = [
            (
                inbox.take((slot.numbers,), slot.travels_as).to(slot.dtype),
                inbox.take(slot.counts, count_dtype(ranks.device)),
            )
            for inbox in inboxes
        ]
        # Added in the order of the ranks, so the sum does not depend on the order of arrival.
        total = torch.stack([numbers for numbers, _ in parts]).sum(0)
        totals.append(unpacked(total, slot.shape))
        counts.append(torch.stack([part for _, part in parts]).sum(0))
    known = iter(_on_cpu(counts))
    return [None if total is None else _moment(total, next(known)) for total in totals]


def moments_at_owner(
    slots: Sequence[Slot],
    totals: Sequence[Tensor | None],
    counts: Sequence[Tensor | None],
    ranks: Ranks,
) -> list[Moment | None]:
    """Sums that their owners have already, with the counts of all ranks, which are sent here.

    Args:
        slots: what is summed.
        totals: the sums of own slots; None where nothing was sent, and on other ranks.
        counts: this rank's two numbers of rows for each slot; None if it had no data.
        ranks: the ranks that work together.
    """
    device = ranks.device
    outgoing: list[list[Tensor]] = [[] for _ in range(ranks.size)]
    for slot, count in zip(slots, counts, strict=True):
        assert slot.owner is not None
        none = torch.zeros(slot.counts, dtype=count_dtype(device), device=device)
        outgoing[slot.owner].append(none if count is None else stacked_counts([*count], device))
    own = [slot.counts for slot in slots if slot.owner == ranks.rank]
    each = sum(size_of(shape, count_dtype(device)) for shape in own)
    inboxes = ranks.start_exchange(outgoing, [each] * ranks.size).wait()
    known = [[inbox.take(shape, count_dtype(device)) for shape in own] for inbox in inboxes]
    of_own = iter(_on_cpu([torch.stack(parts).sum(0) for parts in zip(*known, strict=True)]))
    numbers = [next(of_own) if slot.owner == ranks.rank else None for slot in slots]
    return [
        None if total is None or number is None else _moment(total, number)
        for total, number in zip(totals, numbers, strict=True)
    ]


def added(one: Statistics | None, other: Statistics | None) -> Statistics:
    """The sums of two parts of a step."""
    parts = [part for part in (one, other) if part is not None]
    return Statistics(*(_added([getattr(part, side) for part in parts]) for side in SIDES))


def _added(moments: Sequence[Moment | None]) -> Moment | None:
    present = [moment for moment in moments if moment is not None]
    if len(present) < 2:
        return present[0] if present else None
    one, other = present
    return Moment(one.total + other.total, one.count + other.count, one.uses + other.uses)


def sum_everywhere(slots: Sequence[Slot], ranks: Ranks) -> list[Moment | None]:
    """Each slot's sum on every rank; None if no rank has data."""
    if not slots:
        return []
    parts = [_parts(slot, ranks.device) for slot in slots]
    counts = torch.cat([counts.flatten() for _, counts in parts])
    totals: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(slot.dtype for slot in slots):
        places = [place for place, slot in enumerate(slots) if slot.dtype == dtype]
        flat = torch.cat([parts[place][0] for place in places])
        ranks.sum_in_place(flat)
        pieces = flat.split([slots[place].numbers for place in places])
        totals.update(zip(places, pieces, strict=True))
    ranks.sum_in_place(counts)
    known = _on_cpu(_divided_counts(counts, slots))
    return [
        _moment(unpacked(totals[place], slot.shape), known[place])
        for place, slot in enumerate(slots)
    ]


def statistics_of(slots: Sequence[Slot], sums: Sequence[Moment | None]) -> dict[Tensor, Statistics]:
    """The sums as statistics, by parameter."""
    found: dict[Tensor, dict[str, Moment | None]] = {}
    for slot, moment in zip(slots, sums, strict=True):
        for parameter in slot.parameters:
            found.setdefault(parameter, dict.fromkeys(SIDES))[slot.side] = moment
    return {parameter: Statistics(**sides) for parameter, sides in found.items()}


def _parts(slot: Slot, device: torch.device) -> tuple[Tensor, Tensor]:
    """This rank's part: the total as triangles, and its two counts."""
    part = slot.local_part
    if part is None:
        zeros = torch.zeros(slot.numbers, dtype=slot.travels_as, device=device)
        return zeros, torch.zeros(slot.counts, dtype=count_dtype(device), device=device)
    numbers = packed(part.total.to(slot.dtype)).to(slot.travels_as)
    return numbers, stacked_counts([part.count, part.uses], device)


def _divided_counts(flat: Tensor, slots: Sequence[Slot]) -> list[Tensor]:
    """The counts of all slots, which were joined to one tensor."""
    parts = flat.split([math.prod(slot.counts) for slot in slots])
    return [part.view(slot.counts) for part, slot in zip(parts, slots, strict=True)]


def _on_cpu(counts: Sequence[Tensor]) -> list[Tensor]:
    """All counts at once, because this waits for an accelerator."""
    if not counts:
        return []
    flat = torch.cat([count.flatten() for count in counts]).cpu().double()
    parts = flat.split([count.numel() for count in counts])
    return [part.view(count.shape) for part, count in zip(parts, counts, strict=True)]


def _moment(total: Tensor, counts: Tensor) -> Moment | None:
    count, uses = counts
    return Moment(total, count, uses) if bool(count.any()) else None
