"""Which layers read which tensor while the gate is open: one tensor has one moment.

q, k and v read the same tensor, so its moment is formed once. A shared input lives as long as the
graph that can deliver to it; once a backward pass has reached it, it is kept until the step.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor

from gomuon.capture.tap import backward_pass, gradient, in_backward, leaf
from gomuon.moments import Moment

if TYPE_CHECKING:
    from gomuon.capture.hooks import LayerHook

Term = tuple[Moment | None, float]  # a moment, and how often a sum contains it


class SharedInput:
    """One input tensor of one forward pass, and the layers that read it.

    The first reader that the backward pass comes to forms the moment. Every reader's tap counts its
    own rows, so a reader the loss did not reach, or a pass that was only a recomputation, counts
    nothing.
    """

    def __init__(self, leader: "LayerHook", x: Tensor) -> None:
        self.leader = leader  # the first reader
        self._input, self._version = weakref.ref(x), x._version
        self.former: LayerHook | None = None  # the reader that forms the moment
        self._pass: int | None = None  # the backward pass in which `former` was chosen
        self.total = leaf(leader.dtype, x.device, *leader.shapes[0])
        self.counts: dict[LayerHook, Tensor] = {}

    def is_of(self, x: Tensor) -> bool:
        """Whether x is the tensor that was read, not written to since."""
        return self._input() is x and self._version == x._version

    def forms(self, reader: "LayerHook") -> bool:
        """Whether this reader forms the moment: the first one that asks does.

        A pass that ended without a result, as `torch.autograd.grad` makes them, chooses nobody.
        """
        now = backward_pass()
        if self.former is None or (self.total.grad is None and now != self._pass):
            self.former, self._pass = reader, now
        return self.former is reader

    def count_of(self, reader: "LayerHook") -> Tensor:
        """The probe that counts this reader's rows."""
        return self.counts.setdefault(reader, leaf(torch.float64, self.total.device))

    @property
    def filled(self) -> bool:
        """Whether a backward pass has delivered the moment."""
        return self.total.grad is not None

    @property
    def times(self) -> dict["LayerHook", float]:
        """How often each reader's backward passed over the rows, relative to the former's."""
        counts = {hook: c.grad for hook, c in self.counts.items() if c.grad is not None}
        rows = float(counts[self.former]) if self.former in counts else 0.0
        return {hook: float(count) / rows for hook, count in counts.items()} if rows else {}

    @property
    def moment(self) -> Moment:
        """The moment, once it is filled."""
        assert self.former is not None
        count = gradient(self.counts[self.former])
        return Moment(gradient(self.total), count, count)

    def absorb(self, other: "SharedInput") -> None:
        """Add another one's sums to these."""
        for mine, theirs in (
            (self.total, other.total),
            *((self.counts[hook], other.counts[hook]) for hook in other.times),
        ):
            assert mine.grad is not None
            assert theirs.grad is not None
            mine.grad.add_(theirs.grad)


class SharedInputs:
    """The gate of one group's hooks, and the inputs their layers read while it is open."""

    def __init__(self) -> None:
        self.open = False  # whether any of the hooks captures
        self._mask: Tensor | None = None
        self._last_mask: Tensor | None = None
        # By leader, in the order of the forward passes. Weak: the tap's graph keeps an input alive.
        self._led: dict[LayerHook, WeakKeyDictionary[SharedInput, None]] = {}
        self._reached: set[SharedInput] = set()  # by a backward pass; kept alive here
        self._by_id: WeakValueDictionary[int, SharedInput] = WeakValueDictionary()

    def of(self, x: Tensor, hook: "LayerHook") -> SharedInput:
        """The shared input for x as `hook` reads it; `hook` leads a new one if there is none."""
        known = self._by_id.get(id(x))
        # The same object, alive and not written to since: q, k and v of one attention. A hook that
        # has led an input of x leads again, so that checkpointing's second pass saves the same.
        if (
            known is not None
            and known.is_of(x)
            and known.leader is not hook
            and known.leader.rows == hook.rows
            and self._counts(known)
        ):
            return known
        shared = SharedInput(hook, x)
        self._by_id[id(x)] = shared
        self._led.setdefault(hook, WeakKeyDictionary())[shared] = None
        return shared

    def _counts(self, shared: SharedInput) -> bool:
        """Whether it was neither dropped nor merged into another."""
        return shared in self._led.get(shared.leader, ())

    def forms(self, shared: SharedInput, hook: "LayerHook") -> bool:
        """Asked in the backward pass: whether this hook forms the moment of this input."""
        if self._counts(shared):
            self._reached.add(shared)
        return shared.forms(hook)

    def terms(self) -> dict["LayerHook", list[Term]]:
        """The terms of each hook's Σ x xᵀ: filled inputs, and how often its sum contains each."""
        terms: dict[LayerHook, list[Term]] = {}
        for shared in (shared for led in self._led.values() for shared in led):
            if shared.filled and (times := shared.times):
                moment = shared.moment
                for hook, often in times.items():
                    terms.setdefault(hook, []).append((moment, often))
        return terms

    def merge(self, leader: "LayerHook") -> None:
        """Merge filled inputs with the same readers, to bound memory."""
        led = list(self._led.get(leader, ()))
        if not in_backward():
            # Reached by a pass that is over and delivered nothing: only its graph may keep it.
            self._reached.difference_update(shared for shared in led if not shared.filled)
        filled = [shared for shared in led if shared.filled]
        for i, shared in enumerate(filled):
            older = next(
                (s for s in filled[:i] if self._counts(s) and s.times == shared.times), None
            )
            if older is not None:
                older.absorb(shared)
                self._drop(shared)

    def forget_sums_of(self, hook: "LayerHook") -> None:
        """Drop sums delivered to readers none of which has a gradient any more, `hook` included."""

        def stale(shared: SharedInput) -> bool:
            readers = shared.counts
            return shared.filled and hook in readers and all(r.was_zeroed for r in readers)

        self._drop_reached(stale)

    def forget_sums(self) -> None:
        """Drop what backward passes delivered; keep inputs whose backward is still to come."""
        self._drop_reached(lambda shared: shared.filled)

    def _drop_reached(self, unwanted: Callable[[SharedInput], bool]) -> None:
        for shared in [shared for shared in self._reached if unwanted(shared)]:
            self._drop(shared)

    def _drop(self, shared: SharedInput) -> None:
        """Let it count no longer, even if a graph still holds it."""
        self._led[shared.leader].pop(shared, None)
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
        """The mask of this forward pass; in a recomputation during backward, the last one used."""
        recomputed = not torch.compiler.is_compiling() and in_backward()
        return self._last_mask if recomputed else self._mask

    def remember_mask(self) -> None:
        """Note the mask at every real forward pass, for its recomputation."""
        self._last_mask = self._mask

    def clear(self) -> None:
        """Forget everything but the mask in use."""
        self._led.clear()
        self._reached.clear()
        self._by_id.clear()
        self._last_mask = self._mask
