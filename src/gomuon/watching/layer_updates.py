"""What an observer is handed: one layer's quantities in one step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gomuon.parameters.layers import Layer
from gomuon.parameters.stacks import Stack
from gomuon.step import Group


@dataclass(frozen=True)
class LayerUpdate:
    """A layer that a step has just moved. All tensors are [matrices, …] and only for reading.

    They may be overwritten by the next step: clone what you keep.

    Attributes:
        layer: the parameter's name.
        parameter: the parameter, already moved.
        gradient: G.
        source: M̂, or what the method uses instead.
        direction: D.
        update: U; the weights moved by −lr·U, apart from weight decay.
        left_map: P_B in any of the three forms of `functional/block_diagonal.py`; None: identity.
        right_map: P_A.
    """

    layer: str
    parameter: Tensor
    gradient: Tensor
    source: Tensor
    direction: Tensor
    update: Tensor
    left_map: Tensor | None
    right_map: Tensor | None


class HandedUpdates:
    """Hands every layer's update to a function."""

    def __init__(self, function: Callable[[LayerUpdate], Any]) -> None:
        self._function = function

    def before_refresh(
        self, observed: Sequence[Layer], renewed: Sequence[Layer], group: Group
    ) -> None:
        """Nothing is needed before a refresh."""

    def updated(self, stack: Stack, source: Tensor, D: Tensor, U: Tensor, group: Group) -> None:
        """Hand over every layer of the stack; see `step.Observer`."""
        left, right = stack.map("left_map"), stack.map("right_map")
        begin = 0
        for layer in stack.layers:
            own = slice(begin, begin + layer.blocks)
            begin += layer.blocks
            self._function(
                LayerUpdate(
                    layer.name,
                    layer.parameter,
                    stack.G[own],
                    source[own],
                    D[own],
                    U[own],
                    None if left is None else left[own],
                    None if right is None else right[own],
                )
            )
