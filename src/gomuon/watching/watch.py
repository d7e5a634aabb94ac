"""A running watch: it measures after updates, reads the device once per record, and delivers."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from gomuon.distributed.team import Team
from gomuon.errors import describe_value
from gomuon.parameters.layers import Layer
from gomuon.parameters.stacks import Stack
from gomuon.step import Group, Step
from gomuon.watching.measures import Spectra, has_polar_length, lengths, powers_of
from gomuon.watching.negatives import NegativeCounts
from gomuon.watching.readings import Reading, read, rows_of
from gomuon.watching.records import WatchRecord
from gomuon.watching.refreshes import Refresh, before_refresh

Writer = Callable[[list[WatchRecord]], Any]

_MAPS = ("left_map", "right_map", "left_basis", "right_basis", "left_values", "right_values")


class Watch:
    """What `optimizer.watch()` returns: it delivers records until it is removed.

    As a context manager it removes itself at the end. Without a writer, records wait until they are
    taken: iterating over the watch takes them.

    Attributes:
        every: a record for each layer every so many steps.
        spectra: a layer's spectra are measured in every so-manyth record, layers taking turns.
        latest: the last record of every layer, by name.
        history: the last records of every layer, the newest last.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        step: Step,
        every: int,
        to: Writer | Iterable[Writer] | None,
        spectra: int,
        *,
        rank: Callable[[], int],
        team: Callable[[], Team] | None,
    ) -> None:
        self.every = _whole(every, "every")
        self.spectra = _whole(spectra, "spectra")
        self._writers = _writers(to)
        self._waiting: list[WatchRecord] = []
        self.latest: dict[str, WatchRecord] = {}
        self.history: dict[str, list[WatchRecord]] = {}
        self._step, self._rank, self._team = step, rank, team
        self._method = type(optimizer).__name__
        self._taken = self._steps_taken(optimizer)
        self._since = 0  # steps taken since the last record
        self._made = 0  # records so far, for the layers' turns
        self._turns: dict[Tensor, int] = {}
        self._renewed: dict[Tensor, int] = {}  # the step of each layer's last refresh
        self._refreshes: dict[Tensor, Refresh] = {}  # kept before a refresh of this step
        self._measured: dict[str, tuple[int, dict[str, Tensor]]] = {}  # refreshes of this window
        self._readings: list[Reading] = []
        self._negatives = NegativeCounts()
        step.observers.append(self)
        self._hook = optimizer.register_step_post_hook(self._after_step)
        self._is_running = True

    # ---- for the user ----------------------------------------------------------------------------

    def remove(self) -> None:
        """Stop watching. Nothing of it stays in the optimizer."""
        if self._is_running:
            self._is_running = False
            self._step.observers.remove(self)
            self._hook.remove()
            self._drop()

    def take(self) -> list[WatchRecord]:
        """The records that wait, oldest first; they wait only if there is no writer."""
        waiting, self._waiting = self._waiting, []
        return waiting

    def __iter__(self) -> Iterator[WatchRecord]:
        return iter(self.take())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()

    # ---- in the step -----------------------------------------------------------------------------

    def before_refresh(
        self, observed: Sequence[Layer], renewed: Sequence[Layer], group: Group
    ) -> None:
        """Keep the maps of layers that are about to get new ones; see `step.Observer`."""
        geometry = self._step.recipe.geometry
        self._refreshes.clear()
        if geometry.acts_after:  # what it renews is used from the next step on
            return
        for layer in renewed:
            self._renewed[layer.parameter] = group["step"]
            if self._has_turn(layer) and layer.name not in self._measured:
                self._refreshes[layer.parameter] = before_refresh(layer, geometry, group)

    def updated(self, stack: Stack, source: Tensor, D: Tensor, U: Tensor, group: Group) -> None:
        """Measure a stack that has just moved; see `step.Observer`."""
        self._negatives.add(stack, source, U)
        record = self._since + 1 >= self.every
        refreshes = [self._refreshes.pop(layer.parameter, None) for layer in stack.layers]
        if not record and not any(refreshes):
            return
        self._measure(stack, source, D, refreshes, group)
        if record:
            self._readings.append(self._reading(stack, source, D, U, group))

    def _measure(
        self,
        stack: Stack,
        source: Tensor,
        D: Tensor,
        refreshes: Sequence[Refresh | None],
        group: Group,
    ) -> None:
        """Spectra of layers that refresh or are recorded, once between two records."""
        record = self._since + 1 >= self.every
        chosen = [
            index
            for index, (layer, refresh) in enumerate(zip(stack.layers, refreshes, strict=True))
            if layer.name not in self._measured and (refresh or (record and self._has_turn(layer)))
        ]
        if not chosen:
            return
        kept = [refreshes[index] for index in chosen]
        found = Spectra(self._step.recipe, stack, chosen, kept, group).measured(source, D)
        for index, refresh, numbers in zip(chosen, kept, found, strict=True):
            layer = stack.layers[index]
            before = {} if refresh is None else refresh.measured(layer)
            self._measured[layer.name] = group["step"] + 1, {**numbers, **before}

    def _reading(self, stack: Stack, source: Tensor, D: Tensor, U: Tensor, group: Group) -> Reading:
        numbers = lengths(stack, source, D, U, group)
        sizes = [layer.blocks for layer in stack.layers]
        measured = [self._measured.get(layer.name) for layer in stack.layers]
        for name in {name for one in measured if one is not None for name in one[1]}:
            numbers[name] = torch.cat(
                [_spread(one, name, n, source) for one, n in zip(measured, sizes, strict=True)]
            )
        recipe = self._step.recipe
        return Reading(
            stack.layers,
            rows_of(numbers, sizes),
            group,
            powers_of(recipe, group),
            has_polar_length(recipe, group),
            measured=[None if one is None else one[0] for one in measured],
            ages=[self._age(layer, group) for layer in stack.layers],
        )

    def _has_turn(self, layer: Layer) -> bool:
        if layer.parameter not in self._turns:
            # Neighbours in a stack have the same turn, because one call measures them together.
            present = [one for group in self._step.participants.values() for one in group.layers]
            self._turns = {
                one.parameter: index * self.spectra // len(present)
                for index, one in enumerate(present)
            }
        return self._turns.get(layer.parameter, 0) == self._made % self.spectra

    def _age(self, layer: Layer, group: Group) -> int | None:
        renewed = self._renewed.get(layer.parameter)
        if renewed is None or not any(name in layer.state for name in _MAPS):
            return None
        age = int(group["step"] - renewed)
        return age if age >= 0 else None  # an older checkpoint was loaded

    # ---- after the step --------------------------------------------------------------------------

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        taken = self._steps_taken(optimizer)
        self._refreshes.clear()
        if taken == self._taken:  # the step was skipped
            return
        self._taken = taken
        self._since += 1
        if self._since >= self.every:
            records = self._read()
            self._deliver(records if self._team is None else self._team().collected(records))

    @staticmethod
    def _steps_taken(optimizer: torch.optim.Optimizer) -> int:
        return sum(group.get("step", 0) for group in optimizer.param_groups)

    def _read(self) -> list[WatchRecord]:
        """The records of this step. Waits for the device, once."""
        readings = self._readings
        columns = [reading.rows for reading in readings]
        numbers = read([*columns, *self._negatives.tensors()])
        negatives = self._negatives.by_layer(numbers[len(columns) :])
        records: dict[str, WatchRecord] = {}
        for reading, rows in zip(readings, numbers, strict=False):
            for record in reading.records(rows, negatives, self._method, self._rank()):
                records[record.layer] = record
        self._drop()
        self._made += 1
        return list(records.values())

    def _drop(self) -> None:
        """Forget everything of this window."""
        self._since = 0
        self._readings.clear()
        self._negatives.clear()
        self._measured.clear()
        self._refreshes.clear()

    def _deliver(self, records: list[WatchRecord]) -> None:
        for record in records:
            self.latest[record.layer] = record
            kept = self.history.setdefault(record.layer, [])
            kept.append(record)
            del kept[:-HISTORY]
        if not self._writers:
            self._waiting += records
        for write in self._writers:
            write(records)


HISTORY = 64  # records of each layer that a watch remembers


def _spread(
    measured: tuple[int, dict[str, Tensor]] | None, name: str, size: int, like: Tensor
) -> Tensor:
    """A number of a layer for each of its matrices; NaN if it was not measured."""
    value = None if measured is None else measured[1].get(name)
    if value is None:
        return torch.full((size,), torch.nan, dtype=like.dtype, device=like.device)
    return value.to(like.dtype).expand(size)


def _whole(value: int, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number >= 1, got {describe_value(value)}")
    return value


def _writers(to: Writer | Iterable[Writer] | None) -> list[Writer]:
    writers = [] if to is None else [to] if callable(to) else to
    listed = list(writers) if isinstance(writers, Iterable) else [writers]
    for write in listed:
        if not callable(write):
            raise TypeError(
                "to must be a function of a list of records, or several of them, got "
                f"{describe_value(write)}"
            )
    return listed
