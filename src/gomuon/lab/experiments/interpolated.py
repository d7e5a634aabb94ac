"""A control of the coherence experiment: Go-MUON whose maps change in every step.

Factors are observed every K steps, as in Go-MUON. But a new map is not used at once: over the next
K steps the maps go from the old one to the new one, in equal steps. A mean of positive definite
maps is positive definite, so every step is exact for its own maps (Corollary 2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from torch import Tensor

from gomuon.geometry.base import Group
from gomuon.geometry.captured import CapturedMoments
from gomuon.methods.go_muon import GEOMETRY, RECIPE
from gomuon.optimizer import MatrixOptimizer
from gomuon.parameters.layers import Layer
from gomuon.parameters.stacks import Stack
from gomuon.parameters.state import Entries, both_sides
from gomuon.recipes.stations import Clock

_SIDES = ("left", "right")


@dataclass(frozen=True)
class InterpolatedMoments(CapturedMoments):
    """Maps on their way from the last refresh but one to the last refresh."""

    entries: ClassVar[Entries] = {
        **CapturedMoments.entries,
        **both_sides("begin", one_for="either", cut=True),
        **both_sides("end", one_for="either", cut=True),
    }

    def refresh(
        self,
        observed: Sequence[Layer],
        renewed: Sequence[Layer],
        stacks: Sequence[Stack],
        group: Group,
    ) -> Sequence[Layer]:
        before = {
            layer: {side: layer.state.get(f"{side}_map") for side in _SIDES} for layer in observed
        }
        failed = super().refresh(observed, observed, stacks, group)
        for layer in observed:
            for side, old in before[layer].items():
                new = layer.state.get(f"{side}_map")
                if new is not None:  # the first map has nothing to come from
                    layer.state[f"{side}_begin"] = new if old is None else old
                    layer.state[f"{side}_end"] = new
        for layer in renewed:
            for side in _SIDES:
                if f"{side}_end" in layer.state:
                    layer.set_map(f"{side}_map", _between(layer.state, side, group))
        return failed


def _between(state: dict[str, Any], side: str, group: Group) -> Tensor:
    """The map of this step: 1/K of the way in the step of the refresh, all of it K − 1 later."""
    passed = group["step"] - state["left_seen"] + 1
    begin, end = state[f"{side}_begin"], state[f"{side}_end"]
    return begin.lerp(end, min(1.0, passed / group["refresh_every"]))


class InterpolatedGoMuon(MatrixOptimizer):
    """Go-MUON with interpolated maps. It needs an output side, whose factor says its age."""

    recipe = replace(
        RECIPE,
        name="InterpolatedGoMuon",
        geometry=InterpolatedMoments(
            **{one.name: getattr(GEOMETRY, one.name) for one in fields(GEOMETRY)}
        ),
        clock=Clock(statistics="refresh_every"),
        presets={},
        work=None,
    )
