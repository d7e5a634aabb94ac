"""Checkpoints without the maps that loading can rebuild from their factors, `rebuild_maps=True`.

A map is a function of its factor and of the group's settings, but not always of the factor that is
kept. The factor may be gone (Go-MUON drops A once its root is taken, unless A is averaged), or
rounded after its root was taken (`state_dtype`); a root may have failed, so that an older map is in
use; a setting may have changed since. So nothing is left out on principle: saving rebuilds every
map, and leaves out those that come out bit for bit.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gomuon.functional.linalg import full_precision
from gomuon.parameters.groups import is_matrix, named
from gomuon.parameters.keeping import Keeping
from gomuon.parameters.layers import Layer
from gomuon.parameters.layout import Layout
from gomuon.parameters.state import is_blank
from gomuon.recipes.recipe import Recipe

Group = Mapping[str, Any]
Entries = dict[str, Any]
_FACTORS = {"left_map": "left_factor", "right_map": "right_factor"}


def without_rebuilt_maps(
    saved: Mapping[int, Entries], groups: Sequence[Group], layout: Layout, recipe: Recipe
) -> dict[int, Entries]:
    """A saved state without the maps that `rebuild_maps` would make again, bit for bit.

    Args:
        saved: the state by the numbers of the parameters. It is not changed.
        groups: the optimizer's parameter groups.
        layout: how parameters are cut into matrices.
        recipe: the method's recipe.
    """
    found = dict(saved)
    parameters = [parameter for group in groups for parameter in group["params"]]
    entries = {p: saved[number] for number, p in enumerate(parameters) if number in saved}
    numbers = {parameter: number for number, parameter in enumerate(parameters)}
    for index, group in enumerate(groups):
        if not group.get("rebuild_maps"):
            continue
        chosen = {
            p: [name for name, factor in _FACTORS.items() if name in e and factor in e]
            for p in group["params"]
            if (e := entries.get(p))
        }
        for layer in _rebuilt(chosen, entries, index, group, layout, recipe):
            own = entries[layer.parameter]
            dropped = {
                name
                for name in chosen[layer.parameter]
                if _is_blank_map(own, layer)
                or (name in layer.state and _equal(layer.state[name], own[name]))
            }
            found[numbers[layer.parameter]] = {k: v for k, v in own.items() if k not in dropped}
    return found


def rebuild_maps(
    state: Mapping[Tensor, Entries], groups: Sequence[Group], layout: Layout, recipe: Recipe
) -> None:
    """Make the maps that a loaded state lacks, in groups with `rebuild_maps`.

    A factor without a usable root had no map when it was saved, and has none now.
    """
    for index, group in enumerate(groups):
        if not group.get("rebuild_maps"):
            continue
        chosen = {
            p: [name for name, factor in _FACTORS.items() if name not in e and factor in e]
            for p in group["params"]
            if (e := state.get(p)) and not is_blank(e)
        }
        for layer in _rebuilt(chosen, state, index, group, layout, recipe):
            for name in chosen[layer.parameter]:
                if name in layer.state:
                    state[layer.parameter][name] = layer.state[name]


def _rebuilt(
    chosen: Mapping[Tensor, Sequence[str]],
    state: Mapping[Tensor, Entries],
    index: int,
    group: Group,
    layout: Layout,
    recipe: Recipe,
) -> Iterator[Layer]:
    """Layers like those of the step, whose own states get the chosen maps, made of their factors.

    Layers that share a factor share its map.
    """
    layers = []
    for name, parameter in named(group, index):
        if not chosen.get(parameter) or not is_matrix(group, parameter) or parameter.is_meta:
            continue
        factors = {k: v for k, v in state[parameter].items() if k in _FACTORS.values()}
        spec = layout.spec_of(parameter, group)
        keeping = Keeping.of(group, parameter.device, layout.wide)
        layers.append(Layer(name, parameter, factors, spec, keeping=keeping))
    trained = [layer for layer in layers if not is_blank(state[layer.parameter])]
    with torch.no_grad(), full_precision([layer.parameter for layer in layers]):
        recipe.geometry.renew(trained, (), group)
    yield from layers


def _is_blank_map(entries: Entries, layer: Layer) -> bool:
    """Whether a map was only allocated, and will be left out once it is trained.

    torch.distributed.checkpoint reads only what such a state has.
    """
    return is_blank(entries) and (layer.keeping is None or layer.keeping.dtype is None)


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)
