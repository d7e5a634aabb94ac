"""What every geometry offers to the step."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from gomuon.parameters.stacks import Layer, Stack
from gomuon.parameters.state import Entries

Group = Mapping[str, Any]


class Geometry:
    """One choice on the geometry axis; this one has no maps and does nothing.

    The step calls `observe` and `renew` before the update and `after` behind it. `due` are the
    layers whose turn it is by the method's clock: all or none, unless refreshes are staggered.
    `observe` and `renew` return the layers they could not serve.

    Attributes:
        description: for the table of methods.
        entries: what it keeps in a layer's state.
        reads_weights: whether it reads weights, which sharded ranks then have to gather.
        acts_after: whether `after` does anything.
    """

    description: str = "none"
    entries: ClassVar[Entries] = {}
    reads_weights: ClassVar[bool] = False
    acts_after: ClassVar[bool] = False

    def captured_sides(self, group: Group) -> tuple[bool, bool]:
        """Whether (output gradients, inputs) are captured."""
        return False, False

    def observe(
        self, due: Sequence[Layer], stacks: Sequence[Stack], group: Group
    ) -> Sequence[Layer]:
        """Update factors from this step's statistics or gradients."""
        return ()

    def renew(self, due: Sequence[Layer], stacks: Sequence[Stack], group: Group) -> Sequence[Layer]:
        """Make new maps from the factors."""
        return ()

    def after(self, due: Sequence[Layer], stacks: Sequence[Stack], group: Group) -> None:
        """Renew, after the update, what the next step will use."""
