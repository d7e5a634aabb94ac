"""What a refresh decides about the next one, if each unit of layers finds its own interval."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from gomuon.intervals import Turn
from gomuon.parameters.layers import Layer
from gomuon.parameters.layout import Layout
from gomuon.parameters.stacking import Participants
from gomuon.parameters.state import INTERVAL
from gomuon.recipes.stations import Clock

_NOT_MEASURED = math.inf


class NextIntervals:
    """The intervals of a group's units after a step, alike on all ranks.

    Attributes:
        votes: for each unit that is due: 1 if the cached maps of all its layers were good enough, 0
            if not. Ranks take the least, because a unit may have several owners.
    """

    def __init__(
        self, clock: Clock, group: Mapping[str, Any], present: Participants, layout: Layout
    ) -> None:
        self.votes: dict[str, float] = {}
        self._own: dict[str, float] = {}  # of units that only this rank has
        self._units = layout.units
        self._states: dict[Tensor, dict[str, Any]] = {}
        self._every = clock.adaptive(group)
        if self._every is None:
            return
        own = layout.own
        # Of all ranks, because hooks are opened on all of them.
        for one in (*present.matrices, *present.layers):
            parameter: Tensor = one.parameter
            if parameter not in self._units:
                continue
            self._states[parameter] = one.state
            turn = Turn(layout.phases.get(parameter, 0.0), one.state.get(INTERVAL))
            if clock.renews(group, turn):
                votes = self._own if parameter in own else self.votes
                votes[self._units[parameter]] = _NOT_MEASURED

    def count(self, layers: Sequence[Layer]) -> None:
        """Count what was measured of these layers."""
        for layer in layers:
            if layer.holds is not None:
                unit = self._units[layer.parameter]
                votes = self.votes if unit in self.votes else self._own
                votes[unit] = min(votes[unit], float(layer.holds))
                layer.holds = None

    def settle(self) -> None:
        """Write the intervals into the states. A unit that was not measured keeps its own."""
        if self._every is None:
            return
        votes = {**self.votes, **self._own}
        for parameter, state in self._states.items():
            vote, kept = votes.get(self._units[parameter], _NOT_MEASURED), state.get(INTERVAL)
            if vote == _NOT_MEASURED:
                state[INTERVAL] = self._every.interval(kept)
            else:
                state[INTERVAL] = self._every.after(kept, holds=bool(vote))
