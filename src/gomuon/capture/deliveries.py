"""Sums on their way: what a backward pass is about to deliver, and who is told when it has arrived.

Only used if sums are sent away during the backward pass. Otherwise nobody listens, and nothing is
noted.
"""

from collections.abc import Callable, Iterable

from torch import Tensor


class Deliveries:
    """The deliveries to the probes of one group.

    Attributes:
        listener: called after each delivery; None if nobody listens. It returns whether this
            backward pass is the last one of the step, as far as is known.
        paused: sums stay here until the step.
        dropped: sums were dropped after some of them had been taken away.
    """

    def __init__(self) -> None:
        self.listener: Callable[[], bool] | None = None
        self.paused = False
        self.dropped = False
        self._awaited: set[int] = set()  # ids of leaves
        self._early: set[int] = set()  # of those that have the sums of earlier micro-batches only

    def expect(self, leaves: Iterable[Tensor]) -> None:
        """Called inside the backward pass: autograd will deliver to these leaves next."""
        for leaf in leaves:
            self._awaited.add(id(leaf))
            # Registered here and once for each leaf, because most leaves never need it.
            registered = leaf._post_accumulate_grad_hooks or {}
            if self._arrived not in registered.values():
                leaf.register_post_accumulate_grad_hook(self._arrived)

    def _arrived(self, leaf: Tensor) -> None:
        self._awaited.discard(id(leaf))
        self._early.discard(id(leaf))
        if self.listener is not None and not self.listener():
            self._early.add(id(leaf))

    def awaits(self, leaves: Iterable[Tensor | None]) -> bool:
        """Whether a delivery to one of these leaves is under way."""
        return any(id(leaf) in self._awaited for leaf in leaves)

    def came_early(self, leaves: Iterable[Tensor | None]) -> bool:
        """Whether the last micro-batch has not been added to one of these leaves yet.

        If their sums left before, the order of additions, and with it the last bits, would depend
        on which rank is faster.
        """
        return any(id(leaf) in self._early for leaf in leaves)

    def begin(self) -> None:
        """Forget what was awaited, before the forward passes of a step."""
        self._awaited.clear()
        self._early.clear()
        self.paused = False
