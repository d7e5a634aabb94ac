"""Bytes of a unit's state: in the bits that `state_dtype` says, on the device or on the host."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gomuon.functional.narrow import blocks_of
from gomuon.lab.costs.matrix_layers import MatrixLayer
from gomuon.lab.costs.unit_costs import kept_elements
from gomuon.parameters.keeping import Keeping
from gomuon.parameters.state import MOMENTUM, SCALES, wide_entries
from gomuon.recipes.recipe import Recipe
from gomuon.recipes.work import StepWork

_ACCELERATOR = torch.device("meta")  # any device but the CPU, from which nothing is offloaded


@dataclass(frozen=True)
class StateBytes:
    """Bytes on the parameters' device, and on the host."""

    device: int
    host: int


def state_bytes(
    unit: Sequence[MatrixLayer], recipe: Recipe, work: StepWork, working: torch.dtype
) -> StateBytes:
    """Of everything kept for a unit; tensors that layers share count once."""
    keeping = keeping_of(unit[0].settings, recipe)
    device, host = 0, 0
    for name, elements in kept_elements(unit, work).items():
        size = elements * keeping.dtype_of(name, working).itemsize
        if keeping.is_offloaded(name) and not name.endswith("_seen_each"):
            host += size
        else:
            device += size
    if keeping.dtype_of(MOMENTUM, working) == torch.int8:
        shapes = [x.matrices for x in unit if MOMENTUM in work.keeps(x.matrices, x.settings)]
        scales = sum(x.count * blocks_of(x.m * x.n) for x in shapes)
        device += scales * keeping.dtype_of(SCALES, torch.float32).itemsize
    return StateBytes(device, host)


def keeping_of(settings: Mapping[str, Any], recipe: Recipe) -> Keeping:
    """How a method with these settings keeps its state on an accelerator."""
    return Keeping.of(settings, _ACCELERATOR, wide_entries(recipe.geometry.entries)) or Keeping()
