"""Inputs that several layers read. The moment of a shared input is formed once.

For example, q, k and v read the same tensor. A shared input lives as long as the autograd graph
that can deliver its moment. After a backward pass has reached it, it is kept until the step.
"""

import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Protocol
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor

from gomuon.capture.deliveries import Deliveries
from gomuon.capture.tap import backward_pass, gradient, in_backward, leaf
from gomuon.moments import Moment, Shape, count_dtype
from gomuon.parameters.rows import SumCut

Term = tuple[Moment | None, float]  # a moment, and how many times a sum contains it


class Reader(Protocol):
    """What reads inputs with a weight: the hook of a layer, or products of functions."""

    @property
    def weight(self) -> Tensor:
        """The weight."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of moments."""

    @property
    def rows(self) -> object:
        """How inputs become rows; readers of one tensor share its moment if these are equal."""

    @property
    def cuts(self) -> tuple[SumCut, SumCut]:
        """How the rows of inputs and of gradients are cut."""

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The shapes of the moments of inputs and of gradients."""

    @property
    def count_shape(self) -> tuple[int, ...]:
        """The shape of the two numbers of rows."""

    @property
    def was_zeroed(self) -> bool:
        """Whether the weight has no gradient."""


class SharedInput:
    """One input tensor of one forward pass, and the layers that read it.

    The first reader that the backward pass reaches forms the moment. Every reader's tap counts its
    own rows. So nothing is counted for a reader that the loss does not reach, nor for a forward
    pass that is only a recomputation.
    """

    def __init__(self, leader: Reader, x: Tensor, mask: Tensor | None) -> None:
        self.leader = leader  # the first reader
        self.mask = mask  # its readers'
        self._input, self._version = weakref.ref(x), x._version
        self.chosen: Reader | None = None  # the reader that forms the moment
        self._pass: int | None = None  # the backward pass in which `chosen` was set
        self.total = leaf(leader.dtype, x.device, *leader.shapes[0])
        # Of masked rows, by `chosen`; without a mask the shapes give their number.
        self.counted = None if mask is None else leaf(count_dtype(x.device), x.device, 2)
        self.counts: dict[Reader, Tensor] = {}  # on the CPU, without regard to the mask

    def is_of(self, x: Tensor) -> bool:
        """Whether x is the tensor that was read, and has not been written to since."""
        return self._input() is x and self._version == x._version

    def forms(self, reader: Reader) -> bool:
        """Whether this reader forms the moment. The first reader that asks does.

        The choice is made again if its backward pass ended without a moment, which happens with
        `torch.autograd.grad`.
        """
        now = backward_pass()
        if self.chosen is None or (self.total.grad is None and now != self._pass):
            self.chosen, self._pass = reader, now
        return self.chosen is reader

    def count_of(self, reader: Reader) -> Tensor:
        """The probe that counts this reader's rows."""
        return self.counts.setdefault(
            reader, leaf(torch.float64, torch.device("cpu"), *reader.count_shape)
        )

    @property
    def filled(self) -> bool:
        """Whether a backward pass has delivered the moment."""
        return self.total.grad is not None

    @property
    def times(self) -> dict[Reader, float]:
        """Rows each reader counted, divided by the rows of the chosen reader."""
        grads = {h: c.grad for h, c in self.counts.items() if c.grad is not None}
        counts: dict[Reader, float] = {h: g.flatten().tolist()[0] for h, g in grads.items()}
        rows = 0.0 if self.chosen is None else counts.get(self.chosen, 0.0)
        return {hook: count / rows for hook, count in counts.items()} if rows else {}

    @property
    def moment(self) -> Moment:
        """The moment, once it is filled."""
        assert self.chosen is not None
        leaf = self.counts[self.chosen] if self.counted is None else self.counted
        total, numbers = gradient(self.total), gradient(leaf)
        if numbers.ndim == 2:  # of a stack of one matrix
            total, numbers = total[0], numbers[:, 0]
        return Moment(total, *numbers)

    def add_sums_of(self, other: "SharedInput") -> None:
        """Add the sums of another shared input to these."""
        pairs = [(self.total, other.total)]
        if self.counted is not None and other.counted is not None:
            pairs.append((self.counted, other.counted))
        for mine, theirs in (
            *pairs,
            *((self.counts[hook], other.counts[hook]) for hook in other.times),
        ):
            gradient(mine).add_(gradient(theirs))

    @property
    def leaves(self) -> list[Tensor | None]:
        return [self.total, self.counted, *self.counts.values()]

    def reset(self) -> None:
        """Drop the sums. Another backward pass through the same graph begins anew."""
        self.chosen = None
        for probe in self.leaves:
            if probe is not None:
                probe.grad = None

    def may_join(self, other: "SharedInput") -> bool:
        """Whether the sums of another shared input may be added to these."""
        return (self.mask is None) == (other.mask is None) and self.times == other.times


class SharedInputs:
    """The gate of one group's hooks, and the inputs that are read while it is open."""

    def __init__(self) -> None:
        self.open = False  # whether any hook of the group captures
        self.deliveries = Deliveries()
        self.leaders: dict[Reader, Reader] = {}  # of readers that ever shared an input
        self._mask: Tensor | None = None
        self._last_mask: Tensor | None = None
        # In the order of the forward passes. Weak references: the tap's graph keeps an input alive.
        self._inputs_by_leader: dict[Reader, WeakKeyDictionary[SharedInput, None]] = {}
        self._reached: set[SharedInput] = set()  # reached by a backward pass, kept alive here
        self._by_id: WeakValueDictionary[int, SharedInput] = WeakValueDictionary()

    def of(self, x: Tensor, hook: Reader, mask: Tensor | None) -> SharedInput:
        """The shared input for x as `hook` reads it; a new one, led by `hook`, if none fits.

        `mask` is the one whose rows `hook` leaves out; readers with another do not share.
        """
        known = self._by_id.get(id(x))
        # The same object, alive and not written to since: q, k and v of one attention. The leader
        # of x starts a new one, so activation checkpointing saves the same tensors again when it
        # recomputes.
        if (
            known is not None
            and known.is_of(x)
            and known.leader is not hook
            and known.leader.rows == hook.rows
            and known.mask is mask
            and known.leader.cuts[0] == hook.cuts[0]
            and self._is_active(known)
        ):
            self.leaders[hook] = known.leader
            return known
        shared = SharedInput(hook, x, mask)
        self._by_id[id(x)] = shared
        self._inputs_by_leader.setdefault(hook, WeakKeyDictionary())[shared] = None
        return shared

    def _is_active(self, shared: SharedInput) -> bool:
        """Whether it was neither dropped nor merged into another shared input."""
        return shared in self._inputs_by_leader.get(shared.leader, ())

    def forms(self, shared: SharedInput, hook: Reader) -> bool:
        """In the backward pass: whether this hook forms the moment of this input."""
        if self._is_active(shared):
            self._reached.add(shared)
        return shared.forms(hook)

    @property
    def expect(self) -> Callable[[list[Tensor]], None] | None:
        """For taps: notes what will be delivered, if sums are sent away in the backward pass."""
        if torch.compiler.is_compiling() or self.deliveries.listener is None:
            return None
        return self.deliveries.expect

    def read_by(self, hooks: Collection[Reader]) -> list[SharedInput]:
        """Inputs that these hooks read, and no others do."""
        leaders = [self._inputs_by_leader.get(hook, ()) for hook in hooks]
        return [s for led in leaders for s in led if all(hook in hooks for hook in s.counts)]

    def release(self, hooks: Collection[Reader]) -> None:
        """Drop the sums of inputs that these hooks read, and no others do."""
        for shared in self.read_by(hooks):
            if shared.filled:
                shared.reset()
                self._reached.discard(shared)

    def terms(self, hooks: Collection[Reader] | None = None) -> dict[Reader, list[Term]]:
        """The terms of each hook's Σ x xᵀ: filled inputs, and how many times each is added.

        With `hooks`, only those of inputs that no other hooks read.
        """
        terms: dict[Reader, list[Term]] = {}
        every = (shared for led in self._inputs_by_leader.values() for shared in led)
        for shared in every if hooks is None else self.read_by(hooks):
            if shared.filled and (times := shared.times):
                moment = shared.moment
                for hook, often in times.items():
                    terms.setdefault(hook, []).append((moment, often))
        return terms

    def merge(self, leader: Reader) -> None:
        """Merge filled inputs with the same readers, to bound memory."""
        led = list(self._inputs_by_leader.get(leader, ()))
        if not in_backward():
            # Their backward pass has ended and delivered nothing, so only the graph keeps them.
            self._reached.difference_update(shared for shared in led if not shared.filled)
        filled = [shared for shared in led if shared.filled]
        for i, shared in enumerate(filled):
            older = next((s for s in filled[:i] if self._is_active(s) and s.may_join(shared)), None)
            if older is not None:
                older.add_sums_of(shared)
                self._drop(shared)

    def forget_sums_of(self, hook: Reader) -> None:
        """Drop sums of inputs that `hook` reads if no reader has a gradient any more."""

        def stale(shared: SharedInput) -> bool:
            readers = shared.counts
            return shared.filled and hook in readers and all(r.was_zeroed for r in readers)

        self._drop_reached(stale)

    def forget_sums(self) -> None:
        """Drop delivered sums; keep inputs whose backward pass has not run yet."""
        self._drop_reached(lambda shared: shared.filled)

    def _drop_reached(self, unwanted: Callable[[SharedInput], bool]) -> None:
        for shared in [shared for shared in self._reached if unwanted(shared)]:
            self._drop(shared)

    def _drop(self, shared: SharedInput) -> None:
        """Make it inactive, even if a graph still holds it."""
        self._inputs_by_leader[shared.leader].pop(shared, None)
        self._reached.discard(shared)

    @contextmanager
    def masked(self, mask: Tensor) -> Iterator[None]:
        """Use `mask` for the forward passes inside the context."""
        self._mask = mask
        try:
            yield
        finally:
            self._mask = None

    def mask_now(self) -> Tensor | None:
        """The mask of this forward pass. In a recomputation it is the last mask used."""
        recomputed = not torch.compiler.is_compiling() and in_backward()
        return self._last_mask if recomputed else self._mask

    def remember_mask(self) -> None:
        """Save the mask of a real forward pass for its recomputation."""
        self._last_mask = self._mask

    def remember_forward_mask(self) -> None:
        """The same for a product, which may be in a recomputation itself."""
        if not in_backward():
            self.remember_mask()

    def clear(self) -> None:
        """Drop everything except the mask in use."""
        self._inputs_by_leader.clear()
        self._reached.clear()
        self._by_id.clear()
        self._last_mask = self._mask
