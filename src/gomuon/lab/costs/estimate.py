"""The costs of one method on one model and a number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from gomuon.distributed.assignment import Unit, imbalance, load_per_rank, owners_of
from gomuon.lab.costs.footprint import adamw_bytes, unit_elements
from gomuon.lab.costs.inventory import Inventory, inventory
from gomuon.lab.costs.planned_model import DTYPES, PlannedModel
from gomuon.lab.costs.traffic import Mesh, held_elements, replicated_bytes, step_bytes
from gomuon.lab.costs.work import (
    METHODS,
    MatrixLayer,
    map_work,
    moment_work,
    moments_of,
    statistics_work,
    step_work,
    units_of,
)
from gomuon.lab.errors import LabError
from gomuon.lab.experiments import optimizers
from gomuon.methods.work import flops


@dataclass(frozen=True)
class RankLayout:
    """The mesh, and whether every rank computes everything."""

    mesh: Mesh
    replicate: bool = False


@dataclass(frozen=True)
class Spread:
    """The largest and the mean value of a quantity over the ranks."""

    largest: float
    mean: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(max(values), sum(values) / len(values))


@dataclass(frozen=True)
class CostEstimate:
    """The costs of one method, per rank unless said otherwise; None if there is no such step.

    A reuse step uses the cached geometry, a refresh step computes it anew. Muon has only reuse
    steps, and a method with K = 1 has only refresh steps.

    Attributes:
        method: the name on the command line.
        refresh_every: K; None for a method without refreshes.
        state: bytes of optimizer state.
        moments: bytes of captured sums, on every rank from its backward pass to the step.
        reuse: FLOPs of a reuse step.
        refresh: FLOPs of a refresh step.
        amortised: FLOPs of a step, averaged over K steps.
        sent_reuse: bytes sent on a reuse step.
        sent_refresh: bytes sent on a refresh step.
        imbalance: largest amortised FLOPs of a rank, divided by the mean.
        owned: units and their owners, in the model's order; empty if work is replicated.
    """

    method: str
    refresh_every: int | None
    state: Spread
    moments: int
    reuse: Spread | None
    refresh: Spread | None
    amortised: Spread
    sent_reuse: Spread | None
    sent_refresh: Spread | None
    imbalance: float
    owned: tuple[tuple[Unit, int], ...]


def estimate_cost(
    name: str, planned: PlannedModel, ranks: RankLayout, changes: dict[str, Any]
) -> CostEstimate:
    """The costs of the method `name`; `changes` apply to methods that have these settings."""
    entry = optimizers.find(name)
    if entry is None:
        return _elementwise(name, planned, ranks)
    method = entry.recipe.name
    if method not in METHODS:
        known = [known for known, e in optimizers.ENTRIES.items() if e.recipe.name in METHODS]
        raise LabError(
            f"there is no cost model of {name!r} yet; plan for {', '.join(known)} or "
            f"{optimizers.ADAMW}"
        )
    settings = {**entry.recipe.defaults, **entry.options}
    settings.update({key: value for key, value in changes.items() if key in settings})
    found = _inventory(entry, planned, settings)
    shapes = [(layer.blocks, layer.m, layer.n) for layer in found.layers]
    names = [layer.name for layer in found.layers]
    chosen = owners_of(
        names,
        shapes,
        settings.get("refresh_every"),
        ranks.mesh.ranks,
        together=METHODS[method].captures,
        sides=entry.recipe.geometry.captured_sides(settings)
        if METHODS[method].captures
        else (True, True),
    )
    readers = units_of(found.layers, method)
    units, owners = _apart(readers, dict(zip(names, chosen, strict=True)))
    clock = settings.get("refresh_every", 1)
    statistics_clock = settings.get("statistics_every", clock)

    always = [float(flops(step_work(unit, method, settings))) for unit in units]
    grams = [float(flops(statistics_work(unit, method, settings))) for unit in units]
    maps = [float(flops(map_work(unit, method, settings))) for unit in units]
    moments = sum(flops(moment_work(unit, method, settings, planned.passes)) for unit in readers)
    amortised = [
        step + gram / statistics_clock + renewed / clock
        for step, gram, renewed in zip(always, grams, maps, strict=True)
    ]
    owned = [
        _unit(unit, method, settings, cost) for unit, cost in zip(units, amortised, strict=True)
    ]

    def over_ranks(costs: Sequence[float]) -> list[float]:
        if ranks.replicate:
            return [sum(costs)] * ranks.mesh.ranks
        return load_per_rank(costs, owners, ranks.mesh.ranks)

    # Statistics may be updated between refreshes: Shampoo and K-FAC do it at every step.
    going_on = statistics_clock < clock
    steady = [a + b * going_on for a, b in zip(always, grams, strict=True)]
    renewing = [a + b + c for a, b, c in zip(always, grams, maps, strict=True)]
    renews = METHODS[method].map_of is not None
    reuses = clock > 1 or not renews

    narrow, wide = _sizes(planned.model)

    def sent(refresh: bool) -> Spread:
        moves = METHODS[method].captures and refresh
        if ranks.replicate:
            reduced = replicated_bytes(owned, ranks.mesh, refresh=moves, moment_size=wide)
            return Spread.of(reduced)
        sizes = {"gradient_size": narrow, "working_size": wide}
        coupled = settings.get("kl_clip") is not None
        return Spread.of(
            step_bytes(owned, owners, ranks.mesh, refresh=moves, coupled=coupled, **sizes)
        )

    state = _state(units, owners, method, settings, found, planned, ranks)
    carried = over_ranks(amortised)
    return CostEstimate(
        method=name,
        refresh_every=clock if renews else None,
        state=Spread.of(state),
        moments=wide * sum(_elements(unit, method, settings) for unit in readers),
        reuse=Spread.of([x + moments * going_on for x in over_ranks(steady)]) if reuses else None,
        refresh=Spread.of([x + moments for x in over_ranks(renewing)]) if renews else None,
        amortised=Spread.of([x + moments / statistics_clock for x in carried]),
        sent_reuse=sent(going_on) if reuses else None,
        sent_refresh=sent(True) if renews else None,
        imbalance=imbalance(carried),
        owned=() if ranks.replicate else tuple(zip(owned, owners, strict=True)),
    )


def _elementwise(name: str, planned: PlannedModel, ranks: RankLayout) -> CostEstimate:
    """AdamW for the whole model: its state; its elementwise work is not counted."""
    every = [_as_rows(parameter) for parameter in planned.model.parameters()]
    (_, size), nothing = _sizes(planned.model), Spread(0.0, 0.0)
    state = [float(x) for x in _adamw(every, size, ranks.mesh)]
    return CostEstimate(
        name, None, Spread.of(state), 0, nothing, None, nothing, nothing, None, 1.0, ()
    )


def _inventory(
    entry: optimizers.OptimizerEntry, planned: PlannedModel, settings: dict[str, Any]
) -> Inventory:
    try:
        specs = optimizers.head_specs(entry.per_head, planned.model) if entry.per_head else None
        return inventory(planned.model, entry.recipe, settings, planned.readings, specs=specs)
    except ValueError as error:
        raise LabError(f"the costs of {planned.name!r} cannot be estimated: {error}") from error


def _apart(
    readers: Sequence[Sequence[MatrixLayer]], owners: Mapping[str, int]
) -> tuple[list[list[MatrixLayer]], list[int]]:
    """Units of layers that read one input and have one owner, with their owners."""
    units: dict[tuple[int, int], list[MatrixLayer]] = {}
    for index, unit in enumerate(readers):
        for layer in unit:
            units.setdefault((index, owners[layer.name]), []).append(layer)
    return list(units.values()), [owner for _, owner in units]


def _elements(unit: Sequence[MatrixLayer], method: str, settings: dict[str, Any]) -> int:
    """Elements of the captured sums of layers that read one input."""
    return sum(count * d * d for count, d, _ in moments_of(unit, method, settings))


def _unit(
    layers: Sequence[MatrixLayer], method: str, settings: dict[str, Any], cost: float
) -> Unit:
    return Unit(
        tuple(layer.name for layer in layers),
        tuple(tensor for layer in layers for tensor in layer.tensors),
        tuple(count * d * d for count, d, _ in moments_of(layers, method, settings)),
        cost,
    )


def _state(
    units: Sequence[Sequence[MatrixLayer]],
    owners: Sequence[int],
    method: str,
    settings: dict[str, Any],
    found: Inventory,
    planned: PlannedModel,
    ranks: RankLayout,
) -> list[float]:
    """Bytes on every rank: state of matrices at their owners, AdamW's moments at their rows."""
    _, size = _sizes(planned.model)
    kept = [float(size * unit_elements(unit, method, settings)) for unit in units]
    whole = [sum(kept)] * ranks.mesh.ranks
    held = whole if ranks.replicate else load_per_rank(kept, owners, ranks.mesh.ranks)
    return [a + b for a, b in zip(held, _adamw(found.others, size, ranks.mesh), strict=True)]


def _adamw(parameters: Sequence[tuple[int, int]], size: int, mesh: Mesh) -> list[int]:
    held = [held_elements([tensor], mesh.shards) for tensor in parameters]
    each = [adamw_bytes([rows[shard] for rows in held], size) for shard in range(mesh.shards)]
    return each * mesh.replicas


def _sizes(model: nn.Module) -> tuple[int, int]:
    """Bytes of an element of a weight or gradient, and of state, which is float32 or wider."""
    dtype = next(model.parameters()).dtype
    return dtype.itemsize, 8 if dtype == DTYPES["float64"] else 4


def _as_rows(parameter: nn.Parameter) -> tuple[int, int]:
    rows = parameter.shape[0] if parameter.ndim else 1
    return rows, parameter.numel() // max(1, rows)
