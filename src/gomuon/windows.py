"""What came in while the gate stood open: which layers read which tensor, and what was delivered.

One tensor has one moment, however many layers read it. A reading lives as long as the graph that
could deliver to it; once a backward pass has come, it is kept until the step.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor

from gomuon.probes import Moment, Term, backward_pass, gradient, in_backward, leaf

if TYPE_CHECKING:
    from gomuon.capture import LayerHook


class Reading:
    """One input tensor of one forward pass, and the layers that read it.

    The first reader the backward pass comes to forms the moment. Every reader's tap counts its own
    rows, so that a reader the loss did not reach, or a pass that was only a recomputation, counts
    for nothing.
    """

    def __init__(self, leader: "LayerHook", x: Tensor) -> None:
        self.leader = leader  # who read it first
        self._input, self._version = weakref.ref(x), x._version
        self.former: LayerHook | None = None  # who forms its moment
        self._pass: int | None = None  # the backward pass in which that was settled
        self.total = leaf(leader.dtype, x.device, *leader.shapes[0])
        self.counts: dict[LayerHook, Tensor] = {}

    def is_of(self, x: Tensor) -> bool:
        """Whether x is the tensor that was read, not written to since."""
        return self._input() is x and self._version == x._version

    def forms(self, reader: "LayerHook") -> bool:
        """Whether it is this reader who forms the moment; the first one asked does.

        A pass that ended and delivered nothing, as of `torch.autograd.grad`, settles nothing.
        """
        now = backward_pass()
        if self.former is None or (self.total.grad is None and now != self._pass):
            self.former, self._pass = reader, now
        return self.former is reader

    def count_of(self, reader: "LayerHook") -> Tensor:
        """The reader's counting probe."""
        return self.counts.setdefault(reader, leaf(torch.float64, self.total.device))

    @property
    def filled(self) -> bool:
        return self.total.grad is not None

    @property
    def times(self) -> dict["LayerHook", float]:
        """How often each reader's backward passed over the rows, relative to the former's."""
        counts = {hook: c.grad for hook, c in self.counts.items() if c.grad is not None}
        rows = float(counts[self.former]) if self.former in counts else 0.0
        return {hook: float(count) / rows for hook, count in counts.items()} if rows else {}

    @property
    def whole(self) -> Moment:
        """Its moment, once the backward pass has been there."""
        assert self.former is not None
        count = gradient(self.counts[self.former])
        return Moment(gradient(self.total), count, count)

    def absorb(self, other: "Reading") -> None:
        for mine, theirs in (
            (self.total, other.total),
            *((self.counts[hook], other.counts[hook]) for hook in other.times),
        ):
            assert mine.grad is not None
            assert theirs.grad is not None
            mine.grad.add_(theirs.grad)


class Window:
    """The gate shared by a group's hooks, and what came in while it stood open."""

    def __init__(self) -> None:
        self.open = False  # for some of the hooks at least
        self._mask: Tensor | None = None
        self._last_mask: Tensor | None = None
        # By leader, in the order of the forward passes; the graph behind a tap holds its reading.
        self._readings: dict[LayerHook, WeakKeyDictionary[Reading, None]] = {}
        self._asked: set[Reading] = set()  # those a backward pass came to; held here
        self._inputs: WeakValueDictionary[int, Reading] = WeakValueDictionary()

    def reading_of(self, x: Tensor, hook: "LayerHook") -> Reading:
        """The reading of x that `hook` takes part in; it leads it if nobody else does."""
        known = self._inputs.get(id(x))
        # The same object, still alive and not written to since: q, k and v of one attention. Who
        # has led a reading of x leads again, so that checkpointing's second pass saves the same.
        if (
            known is not None
            and known.is_of(x)
            and known.leader is not hook
            and known.leader.reader == hook.reader
            and self._counts(known)
        ):
            return known
        reading = Reading(hook, x)
        self._inputs[id(x)] = reading
        self._readings.setdefault(hook, WeakKeyDictionary())[reading] = None
        return reading

    def _counts(self, reading: Reading) -> bool:
        """Whether a reading is neither forgotten nor folded."""
        return reading in self._readings.get(reading.leader, ())

    def forms(self, reading: Reading, hook: "LayerHook") -> bool:
        """Asked by backward: whether this hook is to form the reading's moment."""
        if self._counts(reading):
            self._asked.add(reading)
        return reading.forms(hook)

    def shares(self) -> dict["LayerHook", list[Term]]:
        """Of every finished reading its moment, and how often each hook's sum contains it."""
        shares: dict[LayerHook, list[Term]] = {}
        for reading in (reading for led in self._readings.values() for reading in led):
            if reading.filled and (times := reading.times):
                whole = reading.whole
                for hook, often in times.items():
                    shares.setdefault(hook, []).append((whole, often))
        return shares

    def fold(self, leader: "LayerHook") -> None:
        """Merge finished readings of the same readers, to bound memory."""
        led = list(self._readings.get(leader, ()))
        if not in_backward():
            # Asked by a pass that is over and delivered nothing: its graph may hold it, not we.
            self._asked.difference_update(reading for reading in led if not reading.filled)
        filled = [reading for reading in led if reading.filled]
        for i, reading in enumerate(filled):
            older = next(
                (r for r in filled[:i] if self._counts(r) and r.times == reading.times), None
            )
            if older is not None:
                older.absorb(reading)
                self._drop(reading)

    def forget_sums_of(self, hook: "LayerHook") -> None:
        """Drop what was delivered to readers none of whom has a gradient any more, hook first."""

        def stale(reading: Reading) -> bool:
            readers = reading.counts
            return reading.filled and hook in readers and all(r.was_zeroed for r in readers)

        self._drop_asked(stale)

    def forget_sums(self) -> None:
        """Drop what backward passes delivered; forward passes still awaiting theirs stay."""
        self._drop_asked(lambda reading: reading.filled)

    def _drop_asked(self, unwanted: Callable[[Reading], bool]) -> None:
        for reading in [reading for reading in self._asked if unwanted(reading)]:
            self._drop(reading)

    def _drop(self, reading: Reading) -> None:
        """Let it count no longer, whoever else holds it."""
        self._readings[reading.leader].pop(reading, None)
        self._asked.discard(reading)

    @contextmanager
    def masked(self, mask: Tensor) -> Iterator[None]:
        self._mask = mask
        try:
            yield
        finally:
            self._mask = None

    def mask_now(self) -> Tensor | None:
        """The mask of this forward pass; of a recomputation in the backward pass, the last one."""
        recomputed = not torch.compiler.is_compiling() and in_backward()
        return self._last_mask if recomputed else self._mask

    def remember_mask(self) -> None:
        """Noted at every forward pass of its own, for its recomputation."""
        self._last_mask = self._mask

    def clear(self) -> None:
        self._readings.clear()
        self._asked.clear()
        self._inputs.clear()
        self._last_mask = self._mask
