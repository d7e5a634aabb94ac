"""What must be kept or measured of a layer before its maps are renewed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gomuon.functional.linalg import trace_mean
from gomuon.geometry.base import Geometry
from gomuon.geometry.captured import CapturedMoments
from gomuon.geometry.moments_to_maps import SideName, intensity_and_rows
from gomuon.parameters.layers import Layer

Group = Mapping[str, Any]
SIDES: tuple[tuple[SideName, str], ...] = (("left", "output"), ("right", "input"))


@dataclass
class Refresh:
    """A layer at a refresh.

    Attributes:
        step: the number of the step.
        cached: the maps before it, [matrices, …]; None: the identity.
        numbers: OAS intensities and numbers of rows, a scalar each.
        old_trace: the mean of B̄'s diagonal before; None if there was no B̄.
        keeps: the weight that the old B̄ has in the new one; None: the method does not average so.
    """

    step: int
    cached: tuple[Tensor | None, Tensor | None]
    numbers: dict[str, Tensor]
    old_trace: Tensor | None
    keeps: float | None

    def measured(self, layer: Layer) -> dict[str, Tensor]:
        """The numbers that can be known once the factor is new, a scalar each."""
        factor = layer.computed("left_factor")
        if self.keeps is None or factor is None:
            return self.numbers
        new = trace_mean(factor).mean()
        old = torch.zeros_like(new) if self.old_trace is None else self.old_trace
        return {**self.numbers, "output_share": 1 - self.keeps * old / new}


def before_refresh(layer: Layer, geometry: Geometry, group: Group) -> Refresh:
    """What to keep of a layer that is about to refresh. Tensors are kept, not copied."""
    left, right = (layer.map_per_block(f"{side}_map", side) for side, _ in SIDES)
    numbers: dict[str, Tensor] = {}
    for side, name in SIDES:
        found = intensity_and_rows(side, layer, group) if layer.statistics is not None else None
        if found is not None:
            intensity, rows = found
            numbers[f"{name}_rows"] = rows
            if intensity is not None:
                numbers[f"{name}_intensity"] = intensity
    old, keeps = _average_before(layer, geometry, group)
    return Refresh(group["step"] + 1, (left, right), numbers, old, keeps)


def _average_before(
    layer: Layer, geometry: Geometry, group: Group
) -> tuple[Tensor | None, float | None]:
    """The mean of B̄'s diagonal, and its weight in the next B̄, Equation (28)."""
    beta = group.get("factor_decay")
    seen = layer.statistics is not None and layer.statistics.gradients is not None
    if not isinstance(geometry, CapturedMoments) or beta is None or not seen:
        return None, None
    if "left_seen_each" in layer.state:  # each matrix has a weight of its own
        return None, None
    factor = layer.computed("left_factor")
    if factor is None:
        return None, 0.0 if geometry.start is None else None
    waited = group["step"] - layer.state.get("left_seen", 0) if geometry.elapsed else 1
    return trace_mean(factor).mean(), float(beta**waited)
