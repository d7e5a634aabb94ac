"""The costs of one method on one model and a number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from gomuon.distributed.assignment import Unit, imbalance, load_per_rank, owners_of
from gomuon.distributed.narrow_sums import owner_adds
from gomuon.distributed.stream_layout import BUCKET
from gomuon.lab.costs.layers import MatrixLayer, ModelLayers, find_layers, units_of
from gomuon.lab.costs.planned_model import DTYPES, PlannedModel
from gomuon.lab.costs.state_bytes import state_bytes
from gomuon.lab.costs.traffic import (
    Mesh,
    held_elements,
    replicated_bytes,
    step_bytes,
    step_memory,
    sums_in_messages,
)
from gomuon.lab.costs.unit_costs import (
    adamw_bytes,
    layers_work,
    moment_work,
    moments_of,
    renewal_work,
)
from gomuon.lab.errors import LabError
from gomuon.lab.experiments import optimizers
from gomuon.parameters.side_forms import captured_maps
from gomuon.recipes.recipe import Recipe
from gomuon.recipes.work import Work, flops


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
        state: bytes of optimizer state, without what is offloaded.
        offloaded: bytes of optimizer state on the host.
        moments: bytes of the captured sums of all layers, as they are computed.
        held: most bytes of captured sums on a rank at one time. With owners, sums are sent in the
            backward pass: a unit, its message, and the sums this rank receives as an owner.
        messages: bytes held while steps are sent: buffers, and what an owner has collected.
        reuse: FLOPs of a reuse step.
        refresh: FLOPs of a refresh step.
        amortised: FLOPs of a step, averaged over K steps.
        first: FLOPs of the first step, if it is unlike all others.
        sent_reuse: bytes sent on a reuse step.
        sent_refresh: bytes sent on a refresh step.
        imbalance: largest amortised FLOPs of a rank, divided by the mean.
        owned: units and their owners, in the model's order; empty if work is replicated.
    """

    method: str
    refresh_every: int | None
    state: Spread
    offloaded: Spread
    moments: int
    held: int
    messages: Spread
    reuse: Spread | None
    refresh: Spread | None
    amortised: Spread
    first: Spread | None
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
    recipe, work = entry.recipe, entry.recipe.work
    if work is None:
        raise LabError(
            f"{recipe.name} does not state its costs, so there is nothing to plan with; add "
            "work=StepWork(...) to its recipe (gomuon.recipes.work has the parts)"
        )
    settings = {**recipe.defaults, **entry.options}
    settings.update({key: value for key, value in changes.items() if key in settings})
    found = _layers(entry, planned, settings)
    readers = units_of(found.layers)
    units, owners = _apart(readers, _owners(found.layers, recipe, settings, ranks.mesh.ranks))
    every = _interval(recipe.clock.maps, settings)
    statistics_every = _interval(recipe.clock.statistics, settings)

    steps = _flops_of(units, lambda unit: layers_work(unit, work.step))
    grams = _flops_of(units, lambda unit: layers_work(unit, work.observe))
    maps = _flops_of(units, lambda unit: renewal_work(unit, work))
    moments = sum(flops(moment_work(unit, planned.passes)) for unit in readers)
    amortised = [
        step + gram / statistics_every + renewed / every
        for step, gram, renewed in zip(steps, grams, maps, strict=True)
    ]
    owned = [_unit(unit, cost) for unit, cost in zip(units, amortised, strict=True)]

    def over_ranks(costs: Sequence[float]) -> list[float]:
        if ranks.replicate:
            return [sum(costs)] * ranks.mesh.ranks
        return load_per_rank(costs, owners, ranks.mesh.ranks)

    # Statistics may be updated between refreshes: Shampoo and K-FAC do it at every step.
    going_on = statistics_every < every
    steady = [a + b * going_on for a, b in zip(steps, grams, strict=True)]
    renewing = [a + b + c for a, b, c in zip(steps, grams, maps, strict=True)]
    renews = recipe.has_geometry
    reuses = every > 1 or not renews
    first_maps = _flops_of(units, lambda unit: renewal_work(unit, work, first=True))
    first: list[float] | None = None
    if work.first is not None:
        begins = work.first
        first = over_ranks(_flops_of(units, lambda unit: layers_work(unit, begins)))
    elif first_maps != maps:
        added = zip(steps, grams, first_maps, strict=True)
        first = [x + moments for x in over_ranks([sum(parts) for parts in added])]

    narrow, wide = _sizes(planned.model)
    travels = 2 if settings.get("sums_dtype") == "bfloat16" else wide
    groups = len({layer.group for layer in found.layers})
    reads_weights = recipe.geometry.reads_weights or bool(settings.get("geometry_decay"))

    def sent(refresh: bool) -> Spread:
        if ranks.replicate:
            return Spread.of(
                replicated_bytes(
                    owned, ranks.mesh, refresh=refresh, moment_size=wide, groups=groups
                )
            )
        return Spread.of(
            step_bytes(
                owned,
                owners,
                ranks.mesh,
                refresh=refresh,
                groups=groups,
                coupled=settings.get("kl_clip") is not None,
                gradient_size=narrow,
                weight_size=narrow if reads_weights else 0,
                working_size=wide,
                sums_size=travels,
            )
        )

    messages = [0] * ranks.mesh.ranks
    if not ranks.replicate and ranks.mesh.ranks > 1:
        messages = step_memory(
            owned,
            owners,
            ranks.mesh,
            gradient_size=narrow,
            weight_size=narrow if reads_weights else 0,
            working_size=wide,
        )
    carried = over_ranks(amortised)
    sums = wide * sum(_elements(unit) for unit in readers)
    alone = ranks.replicate or ranks.mesh.ranks == 1
    working = DTYPES["float64"] if wide == 8 else DTYPES["float32"]
    kept = [state_bytes(unit, recipe, work, working) for unit in units]
    matrices = over_ranks([float(one.device) for one in kept])
    others = _adamw(found.others, wide, ranks.mesh)
    state = [a + b for a, b in zip(matrices, others, strict=True)]
    return CostEstimate(
        method=name,
        refresh_every=every if renews else None,
        state=Spread.of(state),
        offloaded=Spread.of(over_ranks([float(one.host) for one in kept])),
        moments=sums,
        held=sums if alone else _held(readers, owned, owners, wide, travels, ranks.mesh.ranks),
        messages=Spread.of(messages),
        reuse=Spread.of([x + moments * going_on for x in over_ranks(steady)]) if reuses else None,
        refresh=Spread.of([x + moments for x in over_ranks(renewing)]) if renews else None,
        amortised=Spread.of([x + moments / statistics_every for x in carried]),
        first=None if first is None else Spread.of(first),
        sent_reuse=sent(going_on) if reuses else None,
        sent_refresh=sent(True) if renews else None,
        imbalance=imbalance(carried),
        owned=() if ranks.replicate else tuple(zip(owned, owners, strict=True)),
    )


def _interval(setting: str | None, settings: Mapping[str, Any]) -> int:
    """The steps that a setting of the clock holds; None is every step."""
    return 1 if setting is None else int(settings[setting])


def _flops_of(
    units: Sequence[Sequence[MatrixLayer]], work_of: Callable[[Sequence[MatrixLayer]], Work]
) -> list[float]:
    return [float(flops(work_of(unit))) for unit in units]


def _elementwise(name: str, planned: PlannedModel, ranks: RankLayout) -> CostEstimate:
    """AdamW for the whole model: its state; its elementwise work is not counted."""
    every = [as_rows(parameter) for parameter in planned.model.parameters()]
    (_, size), nothing = _sizes(planned.model), Spread(0.0, 0.0)
    state = [float(x) for x in _adamw(every, size, ranks.mesh)]
    return CostEstimate(
        name,
        None,
        Spread.of(state),
        nothing,
        0,
        0,
        nothing,
        nothing,
        None,
        nothing,
        None,
        nothing,
        None,
        1.0,
        (),
    )


def _layers(
    entry: optimizers.OptimizerEntry, planned: PlannedModel, settings: dict[str, Any]
) -> ModelLayers:
    try:
        specs = optimizers.head_specs(entry.per_head, planned.model) if entry.per_head else None
        return find_layers(planned.model, entry.recipe, settings, planned.uses, specs=specs)
    except ValueError as error:
        raise LabError(f"the costs of {planned.name!r} cannot be estimated: {error}") from error


def _owners(
    layers: Sequence[MatrixLayer], recipe: Recipe, settings: Mapping[str, Any], ranks: int
) -> dict[str, int]:
    """The owner of every layer by name, group by group, as the optimizer chooses them."""
    owners: dict[str, int] = {}
    captured = recipe.geometry.captured_sides(settings)
    for group in dict.fromkeys(layer.group for layer in layers):
        own = [layer for layer in layers if layer.group == group]
        names = [layer.name for layer in own]
        chosen = owners_of(
            names,
            [(x.matrices.count, x.matrices.m, x.matrices.n) for x in own],
            settings.get("refresh_every"),
            ranks,
            together=recipe.geometry.reads_weights or any(captured),
            maps=[_map_sizes(layer, captured) for layer in own] if any(captured) else None,
            group=group,
        )
        owners.update(zip(names, chosen, strict=True))
    return owners


def _map_sizes(layer: MatrixLayer, captured: tuple[bool, bool]) -> list[tuple[int, int]]:
    left, right = layer.factors
    return captured_maps((left.form, right.form), captured)


def _apart(
    readers: Sequence[Sequence[MatrixLayer]], owners: Mapping[str, int]
) -> tuple[list[list[MatrixLayer]], list[int]]:
    """Units of layers that read one input and have one owner, with their owners."""
    units: dict[tuple[int, int], list[MatrixLayer]] = {}
    for index, unit in enumerate(readers):
        for layer in unit:
            units.setdefault((index, owners[layer.name]), []).append(layer)
    return list(units.values()), [owner for _, owner in units]


def _elements(unit: Sequence[MatrixLayer]) -> int:
    return sum(sums.elements for sums, _ in moments_of(unit))


def _held(
    readers: Sequence[Sequence[MatrixLayer]],
    owned: Sequence[Unit],
    owners: Sequence[int],
    size: int,
    travels: int,
    ranks: int,
) -> int:
    """Most bytes of sums on a rank that sends each unit when it is complete, or a small bucket.

    `size` are the bytes of a number of a sum, `travels` those on its way.
    """
    message = sums_in_messages(ranks, size, travels)
    packed = [message * sum(sums.sent for sums, _ in moments_of(unit)) for unit in readers]
    whole = [size * _elements(unit) for unit in readers]
    at_once = max((a + b for a, b in zip(whole, packed, strict=True)), default=0)
    bucket = 2 * BUCKET + BUCKET * message // size  # the sums, and the message
    sending = min(max(at_once, bucket), sum(whole) + sum(packed))
    received = load_per_rank([float(size * sum(unit.moments)) for unit in owned], owners, ranks)
    slices = size * sum(sum(unit.moments) for unit in owned) // ranks if travels < size else 0
    return sending + round(max(received)) + (0 if owner_adds(ranks) else slices)


def _unit(layers: Sequence[MatrixLayer], cost: float) -> Unit:
    return Unit(
        tuple(layer.name for layer in layers),
        tuple(tensor for layer in layers for tensor in layer.tensors),
        tuple(sums.sent for sums, _ in moments_of(layers)),
        cost,
    )


def _adamw(parameters: Sequence[tuple[int, int]], size: int, mesh: Mesh) -> list[int]:
    held = [held_elements([tensor], mesh.shards) for tensor in parameters]
    each = [adamw_bytes([rows[shard] for rows in held], size) for shard in range(mesh.shards)]
    return each * mesh.replicas


def _sizes(model: nn.Module) -> tuple[int, int]:
    """Bytes of an element of a weight or gradient, and of state, which is float32 or wider."""
    dtype = next(model.parameters()).dtype
    return dtype.itemsize, 8 if dtype == DTYPES["float64"] else 4


def as_rows(parameter: nn.Parameter) -> tuple[int, int]:
    """(rows, elements in a row), as sharding along the first dimension cuts a parameter."""
    rows = parameter.shape[0] if parameter.ndim else 1
    return rows, parameter.numel() // max(1, rows)
