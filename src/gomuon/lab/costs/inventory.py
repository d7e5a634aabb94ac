"""A model as the costs see it: its matrices as shapes, and which of them read the same input."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gomuon.capture.model import captured_modules
from gomuon.lab.costs.work import MatrixLayer, Settings
from gomuon.methods.recipe import Recipe
from gomuon.parameters.routing import Routes, RoutingTable, route
from gomuon.parameters.rows import ConvRows, Rows, Sampling
from gomuon.parameters.specs import (
    DEFAULT_SPEC,
    LayerSpec,
    joined_biases,
    layer_specs,
    with_block_size,
)
from gomuon.parameters.stacks import Layer


@dataclass(frozen=True)
class Reading:
    """What a weight read in one forward pass, equal for layers that share it, in how many rows."""

    what: Hashable
    rows: int


Readings = Mapping[Tensor, Reading]


@dataclass(frozen=True)
class Inventory:
    """The routing of a model, its matrices, and (rows, elements in a row) of AdamW's parameters."""

    table: RoutingTable
    layers: tuple[MatrixLayer, ...]
    others: tuple[tuple[int, int], ...]


def inventory(
    model: nn.Module,
    recipe: Recipe,
    settings: Settings,
    readings: Readings | None = None,
    routes: Routes = None,
    specs: Mapping[str, LayerSpec] | None = None,
) -> Inventory:
    """What `recipe` will find in `model`, which may live on the meta device.

    Args:
        model: its parameters are routed and cut as the optimizer would.
        recipe: the method.
        settings: its group's settings.
        readings: what `readings` found; without it no two layers share an input.
        routes: as the optimizer's.
        specs: as the optimizer's.
    """
    table = route(model, routes)
    table = joined_biases(model, table) if recipe.joins_bias else table
    matrices = {entry.parameter for entry in table.treated("matrix")}
    cuts = layer_specs(model, matrices if recipe.joins_bias else set(), specs or {})
    joined = {spec.bias for spec in cuts.values()}

    def sampling(weight: Tensor) -> Sampling:
        return Sampling(ones=cuts.get(weight, DEFAULT_SPEC).bias is not None)

    watched = captured_modules(model, sampling)
    layers = []
    for number, entry in enumerate(table.treated("matrix")):
        parameter = entry.parameter
        if parameter in joined or parameter.numel() == 0:
            continue
        spec = with_block_size(cuts.get(parameter, DEFAULT_SPEC), settings)
        reads: Hashable | None = None
        uses = 1
        if parameter in watched:
            readers = tuple(w.rows for w in watched[parameter])
            seen = Reading(number, 1) if readings is None else readings.get(parameter)
            if seen is not None:
                # Whoever reads one tensor in two ways takes two moments of it.
                reads, uses = (seen.what, readers), seen.rows
        groups = parameter in watched and isinstance(watched[parameter][0].rows, ConvRows)
        shape = Layer(entry.name, parameter, {}, spec)
        tensors = [_rows(tensor) for tensor in (parameter, spec.bias) if tensor is not None]
        layers.append(
            MatrixLayer(
                entry.name,
                tuple(tensors),
                shape.rows,
                shape.columns,
                *shape.shape,
                reads=reads,
                grouped=groups and spec.parts > 1,
                uses=uses,
                float64=entry.parameter.dtype == torch.float64,
            )
        )
    others = tuple(_rows(entry.parameter) for entry in table.treated("adamw"))
    return Inventory(table, tuple(layers), others)


def readings(model: nn.Module, *inputs: Tensor) -> dict[Tensor, Reading]:
    """Weights and what they read in one forward pass, by identity, as the capture finds it.

    On the meta device this costs no memory. A weight that was never called is left out.
    """
    alive: list[Tensor] = []  # a dead tensor's id may come again
    calls: dict[Tensor, list[tuple[int, int]]] = {}
    rows: dict[Tensor, int] = {}
    handles = []
    for weight, modules in captured_modules(model, lambda weight: Sampling()).items():
        for watched in modules:

            def note(
                module: nn.Module,
                args: tuple[Any, ...],
                kwargs: dict[str, Any],
                output: Tensor,
                weight: Tensor = weight,
                reader: Rows = watched.rows,
            ) -> None:
                x: Tensor = args[0] if args else kwargs["input"]
                alive.append(x)
                calls.setdefault(weight, []).append((id(x), x._version))
                rows[weight] = rows.get(weight, 0) + reader.uses(output)

            handles.append(watched.module.register_forward_hook(note, with_kwargs=True))
    try:
        with torch.no_grad():
            model(*inputs)
    finally:
        for handle in handles:
            handle.remove()
    numbers: dict[tuple[tuple[int, int], ...], int] = {}
    return {
        weight: Reading(numbers.setdefault(tuple(seen), len(numbers)), rows[weight])
        for weight, seen in calls.items()
    }


def _rows(parameter: Tensor) -> tuple[int, int]:
    """(rows, elements in a row), as sharding along the first dimension cuts a parameter."""
    rows = parameter.shape[0] if parameter.ndim else 1
    return rows, parameter.numel() // rows if rows else 0
