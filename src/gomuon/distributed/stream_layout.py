"""Which captured sums are sent during the backward pass, in which order, and in which messages.

A *unit* is what is sent and freed together: layers that read the same inputs. Units are sent in the
reverse order of the parameters, which is about the order in which a backward pass finishes them.
Small units share a *bucket*. A bucket is one message to each owner that it has sums for.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gomuon.capture.model import ModelCapture
from gomuon.distributed.sums import SIDES, Slot
from gomuon.functional.linalg import working_dtype
from gomuon.moments import Moment, MomentShapes, Shape, Statistics

MessageKey = tuple[int, torch.dtype, torch.dtype | None]  # owner, dtype, and how it is sent

BUCKET = 2**20  # bytes of sums in a message; a larger unit is a message by itself


@dataclass(frozen=True)
class StreamUnit:
    """Layers of one group that read the same inputs."""

    group: int
    parameters: tuple[Tensor, ...]
    slots: tuple[Slot, ...]

    @property
    def bytes(self) -> int:
        return sum(slot.numbers * slot.dtype.itemsize for slot in self.slots)

    def parts(self, seen: Mapping[Tensor, Statistics]) -> list[Moment | None] | None:
        """This rank's part of each slot; None if layers do not share their inputs as expected."""
        found: list[Moment | None] = []
        for slot in self.slots:
            parts = [getattr(seen[p], slot.side) for p in slot.parameters if p in seen]
            if len({id(part) for part in parts}) > 1:
                return None
            found.append(parts[0] if parts else None)
        return found

    def has_data(self, seen: Mapping[Tensor, Statistics]) -> bool:
        return any(getattr(seen[p], side) for p in self.parameters if p in seen for side in SIDES)


@dataclass(frozen=True)
class Bucket:
    """Units that are sent together."""

    units: tuple[StreamUnit, ...]

    @property
    def messages(self) -> dict[MessageKey, list[Slot]]:
        """The slots of each message."""
        found: dict[MessageKey, list[Slot]] = {}
        for unit in self.units:
            for slot in unit.slots:
                found.setdefault(key_of(slot), []).append(slot)
        return found


def key_of(slot: Slot) -> MessageKey:
    """What the slots of a message have in common."""
    assert slot.owner is not None
    return slot.owner, slot.dtype, slot.sent_as


def buckets_of(capture: ModelCapture, owners: Mapping[Tensor, int]) -> list[Bucket]:
    """All sums that are captured in this step, in the order in which they are sent."""
    units = [
        unit
        for index, group in enumerate(capture.groups)
        if group.shared.open
        for unit in _units(index, capture, owners)
    ]
    buckets: list[list[StreamUnit]] = []
    room = 0
    for unit in reversed(units):
        if unit.bytes > room:
            buckets.append([])
            room = BUCKET
        buckets[-1].append(unit)
        room -= unit.bytes
    return [Bucket(tuple(units)) for units in buckets]


def description(buckets: list[Bucket]) -> list[list[tuple[int, str, int, tuple[int, ...], str]]]:
    """What must be the same on all ranks."""
    return [
        [
            (len(slot.parameters), slot.side, slot.owner or 0, slot.shape, _dtypes(slot))
            for unit in bucket.units
            for slot in unit.slots
        ]
        for bucket in buckets
    ]


def _dtypes(slot: Slot) -> str:
    return str(slot.dtype) if slot.sent_as is None else f"{slot.dtype} sent as {slot.sent_as}"


def _units(index: int, capture: ModelCapture, owners: Mapping[Tensor, int]) -> list[StreamUnit]:
    group, wanted = capture.groups[index], capture.shapes(index)
    readers: dict[Tensor, list[Tensor]] = {}
    for parameter in (p for p in wanted if p in owners):  # not those that only this rank has
        readers.setdefault(group.leader_of(parameter), []).append(parameter)
    return [
        StreamUnit(index, tuple(unit), tuple(_slots(unit, wanted, owners)))
        for unit in readers.values()
    ]


def _slots(
    unit: list[Tensor], wanted: Mapping[Tensor, MomentShapes], owners: Mapping[Tensor, int]
) -> list[Slot]:
    """Output gradients of each layer; inputs once for each owner and shape."""
    slots: dict[object, Slot] = {}
    for parameter in unit:
        owner, dtype = owners[parameter], working_dtype(parameter)
        shapes = wanted[parameter]
        for side in SIDES:
            shape: Shape | None = getattr(shapes, side)
            if shape is None:
                continue
            key = (owner, shape, dtype) if side == "inputs" else parameter
            if key in slots:
                slots[key].parameters.append(parameter)
            else:
                counts, sent_as = shapes.counts, shapes.sent_as
                slots[key] = Slot([parameter], side, owner, shape, dtype, None, counts, sent_as)
    return list(slots.values())
