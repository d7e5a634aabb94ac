"""Who computes each layer, and in which step of the K it refreshes, as the optimizer chooses it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gomuon.distributed.assignment import owners_of
from gomuon.intervals import shortest
from gomuon.lab.costs.matrix_layers import MatrixLayer, units_of
from gomuon.parameters.side_forms import captured_maps
from gomuon.parameters.units import MapSizes, refresh_turns
from gomuon.recipes.recipe import Recipe


@dataclass(frozen=True)
class Division:
    """The layers of a model, divided.

    Attributes:
        units: layers that read one input, have one owner and refresh in one step.
        owners: the rank of each unit.
        turns: the step of the K in which each unit refreshes; 0 if all refresh together.
        readers: the input that each unit reads, by number.
    """

    units: list[list[MatrixLayer]]
    owners: list[int]
    turns: list[int]
    readers: list[int]

    def captured_together(self, turns: frozenset[int]) -> list[list[int]]:
        """The units with these turns, by input: each input's moment is formed once in a step."""
        found: dict[tuple[int, int], list[int]] = {}
        for index, key in enumerate(zip(self.readers, self.turns, strict=True)):
            if self.turns[index] in turns:
                found.setdefault(key, []).append(index)
        return list(found.values())

    def layers_of(self, units: Sequence[int]) -> list[MatrixLayer]:
        return [layer for index in units for layer in self.units[index]]


def divide(
    layers: Sequence[MatrixLayer],
    recipe: Recipe,
    settings: Mapping[str, Any],
    ranks: int,
    *,
    staggered: bool,
) -> Division:
    """Divide a model's layers among ranks, and among the steps of the K if they take turns."""
    captured = recipe.geometry.captured_sides(settings)
    together = recipe.geometry.reads_weights or any(captured)
    splits = any(captured) and not recipe.geometry.reads_weights
    every = shortest(settings.get("refresh_every"))

    def owned(group: int, names: list[str], shapes: Shapes, maps: list[MapSizes]) -> list[int]:
        given = maps if splits else None
        return owners_of(names, shapes, every, ranks, together=together, maps=given, group=group)

    def due(group: int, names: list[str], shapes: Shapes, maps: list[MapSizes]) -> list[int]:
        return refresh_turns(names, shapes, maps, every or 1, group)

    owners = _by_group(layers, captured, owned)
    turns = _by_group(layers, captured, due) if staggered else {}
    units: dict[tuple[int, int, int], list[MatrixLayer]] = {}
    for reader, unit in enumerate(units_of(layers)):
        for layer in unit:
            key = reader, owners[layer.name], turns.get(layer.name, 0)
            units.setdefault(key, []).append(layer)
    return Division(
        list(units.values()),
        [owner for _, owner, _ in units],
        [turn for _, _, turn in units],
        [reader for reader, _, _ in units],
    )


Shapes = list[tuple[int, int, int]]
Choice = Callable[[int, list[str], Shapes, list[MapSizes]], list[int]]


def _by_group(
    layers: Sequence[MatrixLayer], captured: tuple[bool, bool], choose: Choice
) -> dict[str, int]:
    """What is chosen for every layer by name, group by group."""
    chosen: dict[str, int] = {}
    for group in dict.fromkeys(layer.group for layer in layers):
        own = [layer for layer in layers if layer.group == group]
        names = [layer.name for layer in own]
        shapes = [(x.matrices.count, x.matrices.m, x.matrices.n) for x in own]
        forms = [(left.form, right.form) for left, right in (layer.factors for layer in own)]
        maps: list[MapSizes] = [captured_maps(both, captured) for both in forms]
        chosen.update(zip(names, choose(group, names, shapes, maps), strict=True))
    return chosen
