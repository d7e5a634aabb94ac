"""The interface of a geometry, called by the step."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from gomuon.parameters.layers import Layer
from gomuon.parameters.stacks import Stack
from gomuon.parameters.state import Entries

Group = Mapping[str, Any]


class Geometry:
    """Makes factors and maps. This base class has no maps and does nothing.

    The step calls `refresh` before the update, and `after` after it. `refresh` is `observe`, then
    `renew`; a geometry may do both at once, to wait for the device only once. `due` are the layers
    that the method's clock refreshes now: all or none, unless refreshes are staggered. All three
    return the layers that failed.

    Attributes:
        description: one line for the table of methods.
        entries: its entries in a layer's state.
        reads_weights: whether it reads weights. Then ranks with sharded weights gather them.
        acts_after: whether `after` does anything.
        uses_moments: whether its factors are captured moments. Then `block_size` cuts factors,
            otherwise it cuts matrices.
    """

    description: str = "none"
    entries: ClassVar[Entries] = {}
    reads_weights: ClassVar[bool] = False
    acts_after: ClassVar[bool] = False
    uses_moments: ClassVar[bool] = False

    def captured_sides(self, group: Group) -> tuple[bool, bool]:
        """Whether (output gradients, inputs) are captured."""
        return False, False

    def refresh(
        self,
        observed: Sequence[Layer],
        renewed: Sequence[Layer],
        stacks: Sequence[Stack],
        group: Group,
    ) -> Sequence[Layer]:
        """`observe` some layers and `renew` others; either may be none."""
        failed = self.observe(observed, stacks, group)  # (27) A_t, B_t; (28) B̄_t
        return [*failed, *self.renew(renewed, stacks, group)]  # (29) P_A, P_B

    def observe(
        self, due: Sequence[Layer], stacks: Sequence[Stack], group: Group
    ) -> Sequence[Layer]:
        """Update factors from this step's statistics or gradients."""
        return ()

    def renew(self, due: Sequence[Layer], stacks: Sequence[Stack], group: Group) -> Sequence[Layer]:
        """Make new maps from the factors."""
        return ()

    def after(self, due: Sequence[Layer], stacks: Sequence[Stack], group: Group) -> None:
        """Renew after the update what the next step uses."""
