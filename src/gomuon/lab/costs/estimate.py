"""The costs of one method on one model and a number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any

from torch import nn

from gomuon.distributed.assignment import TensorPart, Unit, imbalance
from gomuon.intervals import Turn, shortest
from gomuon.lab.costs.cycle import Spread, StepCost, StepCosts, Turns, busiest, elements_of
from gomuon.lab.costs.division import divide
from gomuon.lab.costs.matrix_layers import MatrixLayer, ModelLayers, find_layers, part_of
from gomuon.lab.costs.planned_model import DTYPES, PlannedModel
from gomuon.lab.costs.state_bytes import state_bytes
from gomuon.lab.costs.traffic import (
    Mesh,
    held_elements,
    status_bytes,
    step_bytes,
    step_memory,
)
from gomuon.lab.costs.unit_costs import adamw_bytes, layers_work, moments_of, renewal_work
from gomuon.lab.errors import LabError
from gomuon.lab.experiments import optimizers
from gomuon.parameters.units import as_phase
from gomuon.recipes.recipe import Recipe
from gomuon.recipes.work import Work, flops

LISTED_STEPS = 1024


@dataclass(frozen=True)
class RankLayout:
    """The ranks, and how they work together.

    Attributes:
        mesh: all ranks.
        replicate: whether every rank computes everything that it has.
        exact: whether whole matrices are gathered of the parts that tensor parallelism makes of
            them; otherwise each part is a matrix of its own.
    """

    mesh: Mesh
    replicate: bool = False
    exact: bool = False

    @property
    def team(self) -> Mesh:
        """The ranks that have the same matrices, and share the work on them."""
        return self.mesh if self.exact else Mesh(self.mesh.replicas, self.mesh.shards)


@dataclass(frozen=True)
class CostEstimate:
    """The costs of one method, per rank unless said otherwise; None if there is no such step.

    A reuse step uses the cached geometry, a refresh step computes it anew, or a part of it if
    refreshes are staggered; its costs are those of the busiest one. Muon has only reuse steps, and
    a method with K = 1 has only refresh steps.

    Attributes:
        method: the name on the command line.
        refresh_every: K; None for a method without refreshes.
        staggered: whether a K-th of the units refreshes at each step.
        state: bytes of optimizer state, without what is offloaded.
        offloaded: bytes of optimizer state on the host.
        moments: bytes of the captured sums of all layers, as they are computed.
        held: most bytes of captured sums on a rank at one time. With owners, sums are sent in the
            backward pass: a unit, its message, and the sums this rank receives as an owner.
        messages: bytes held while steps are sent: buffers, and what an owner has collected.
        reuse: FLOPs of a reuse step.
        refresh: FLOPs of a refresh step.
        amortised: FLOPs of a step, averaged over K steps.
        first: FLOPs of the first step, or of the busiest of the first K, if unlike all others.
        sent_reuse: bytes sent on a reuse step.
        sent_refresh: bytes sent on a refresh step.
        imbalance: largest amortised FLOPs of a rank, divided by the mean.
        owned: units and their owners, in the model's order; empty if work is replicated.
        cycle: the steps whose number leaves 0, 1, … if divided by the length of the cycle; of a
            cycle of more than 1024 steps its first ones, and those that renew maps.
    """

    method: str
    refresh_every: int | None
    staggered: bool
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
    cycle: tuple[StepCost, ...]


def estimate_cost(
    name: str, planned: PlannedModel, ranks: RankLayout, changes: dict[str, Any]
) -> CostEstimate:
    """The costs of the method `name`; `changes` apply to methods that have these settings."""
    entry = optimizers.find(name)
    if name == optimizers.GAUSS_NEWTON:
        raise LabError(
            f"{name} is an oracle for small models in gomuon race; its costs are not planned"
        )
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
    found = _layers(entry, planned, settings, ranks.exact)
    team = ranks.team
    alone = ranks.replicate or team.ranks == 1
    staggered = recipe.has_geometry and _staggers(settings, alone=alone)
    divided = divide(
        found.layers, recipe, settings, 1 if alone else team.ranks, staggered=staggered
    )
    units, owners = divided.units, divided.owners
    every = _interval(recipe.clock.maps, settings) or 1
    statistics_every = _interval(recipe.clock.statistics, settings) or every
    if recipe.clock.statistics is None:
        statistics_every = 1

    steps = _flops_of(units, lambda unit: layers_work(unit, work.step))
    grams = _flops_of(units, lambda unit: layers_work(unit, work.observe))
    maps = _flops_of(units, lambda unit: renewal_work(unit, work))
    first_maps = _flops_of(units, lambda unit: renewal_work(unit, work, first=True))
    amortised = [
        step + gram / statistics_every + renewed / every
        for step, gram, renewed in zip(steps, grams, maps, strict=True)
    ]
    owned = [_unit(unit, cost) for unit, cost in zip(units, amortised, strict=True)]
    narrow, wide = _sizes(planned.model)
    groups = len({layer.group for layer in found.layers})
    reads_weights = recipe.geometry.reads_weights or bool(settings.get("geometry_decay"))
    sizes: dict[str, Any] = {
        "gradient_size": narrow,
        "weight_size": narrow if reads_weights else 0,
        "working_size": wide,
    }
    talk: dict[str, Any] = {"groups": groups, "coupled": settings.get("kl_clip") is not None}
    costs = StepCosts(
        mesh=team,
        replicate=ranks.replicate,
        divided=divided,
        owned=owned,
        always=[]
        if ranks.replicate
        else step_bytes(owned, owners, team, refresh=False, **talk, **sizes),
        beside=status_bytes(ranks.mesh.parts // team.parts, **talk),
        steps=steps,
        grams=grams,
        maps=maps,
        passes=planned.passes,
        groups=groups,
        size=wide,
        travels=2 if settings.get("sums_dtype") == "bfloat16" else wide,
        activation=narrow,
    )
    phases = {turn: as_phase(turn, every) if staggered else 0.0 for turn in divided.turns}
    ahead = recipe.clock.ahead(settings)
    listed = _listed_steps(every, statistics_every, phases, ahead)
    due = [_due(recipe, settings, phases, step) for step in listed]
    known = {both: costs.of(*both) for both in dict.fromkeys(due)}
    reuses = [step for step in known.values() if not step.refreshes]
    refreshes = [step for step in known.values() if step.refreshes]

    first: Spread | None = None
    if work.first is not None:
        begins = work.first
        each = _flops_of(units, lambda unit: layers_work(unit, begins))
        first = Spread.of(costs.over_ranks(each))
    elif first_maps != maps:
        first = busiest([costs.work(*both, first_maps) for both in known])

    messages = [0] * team.ranks
    if not alone:
        messages = step_memory(owned, owners, team, **sizes)
    every_turn = Turns(divided.turns)
    moments = costs.captured(every_turn)
    carried = costs.over_ranks(amortised)
    working = DTYPES["float64"] if wide == 8 else DTYPES["float32"]
    kept = [state_bytes(unit, recipe, work, working) for unit in units]
    matrices = costs.over_ranks([float(one.device) for one in kept])
    others = _adamw(found.others, wide, team)
    state = [a + b for a, b in zip(matrices, others, strict=True)]
    return CostEstimate(
        method=name,
        refresh_every=every if recipe.has_geometry else None,
        staggered=staggered,
        state=Spread.of(state),
        offloaded=Spread.of(costs.over_ranks([float(one.host) for one in kept])),
        moments=wide
        * sum(
            elements_of(divided.layers_of(unit)) for unit in divided.captured_together(every_turn)
        ),
        held=max(step.held for step in known.values()),
        messages=Spread.of(messages),
        reuse=busiest([step.work for step in reuses]),
        refresh=busiest([step.work for step in refreshes]),
        amortised=Spread.of(
            [own + sums / statistics_every for own, sums in zip(carried, moments, strict=True)]
        ),
        first=first,
        sent_reuse=busiest([step.sent for step in reuses]),
        sent_refresh=busiest([step.sent for step in refreshes]),
        imbalance=imbalance(carried),
        owned=() if ranks.replicate else tuple(zip(owned, owners, strict=True)),
        cycle=tuple(known[both] for both in due),
    )


def _staggers(settings: Mapping[str, Any], *, alone: bool) -> bool:
    """Whether layers take turns, as `TeamFinder.staggers` decides it."""
    given = settings.get("stagger", False)
    return not alone if given == "auto" else bool(given)


def _listed_steps(
    every: int, statistics_every: int, phases: Mapping[int, float], ahead: int
) -> Sequence[int]:
    """The steps of a cycle that are counted one by one; `ahead` is the clock's."""
    if (length := lcm(every, statistics_every)) <= LISTED_STEPS:
        return range(length)
    renewing = {(int(phase * every) - ahead) % every for phase in phases.values()}
    return sorted({*range(LISTED_STEPS), *renewing})


def _due(
    recipe: Recipe, settings: Mapping[str, Any], phases: Mapping[int, float], step: int
) -> tuple[Turns, Turns]:
    """The turns that a step observes, and those that it renews, given the phase of each."""
    if not recipe.has_geometry:
        return Turns(), Turns()
    group, clock = {**settings, "step": step}, recipe.clock
    return (
        Turns(turn for turn, phase in phases.items() if clock.observes(group, Turn(phase))),
        Turns(turn for turn, phase in phases.items() if clock.renews(group, Turn(phase))),
    )


def _interval(setting: str | None, settings: Mapping[str, Any]) -> int | None:
    """The steps that a setting of the clock holds, of an adaptive one the fewest."""
    return None if setting is None else shortest(settings[setting])


def _flops_of(
    units: Sequence[Sequence[MatrixLayer]], work_of: Callable[[Sequence[MatrixLayer]], Work]
) -> list[float]:
    return [float(flops(work_of(unit))) for unit in units]


def _elementwise(name: str, planned: PlannedModel, ranks: RankLayout) -> CostEstimate:
    """AdamW for the whole model: its state; its elementwise work is not counted."""
    layout = planned.layout(ranks.exact)
    every = [part_of(parameter, layout) for parameter in planned.model.parameters()]
    (_, size), nothing = _sizes(planned.model), Spread(0.0, 0.0)
    state = [float(x) for x in _adamw(every, size, ranks.team)]
    return CostEstimate(
        name,
        None,
        False,
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
        (StepCost(False, nothing, nothing, 0),),
    )


def _layers(
    entry: optimizers.OptimizerEntry, planned: PlannedModel, settings: dict[str, Any], exact: bool
) -> ModelLayers:
    model, layout = planned.model, planned.layout(exact)
    try:
        specs = optimizers.head_specs(entry.per_head, model) if entry.per_head else None
        return find_layers(
            model, entry.recipe, settings, planned.uses, planned.routes, specs, layout
        )
    except ValueError as error:
        raise LabError(f"the costs of {planned.name!r} cannot be estimated: {error}") from error


def _unit(layers: Sequence[MatrixLayer], cost: float) -> Unit:
    sums = moments_of(layers)
    return Unit(
        tuple(layer.name for layer in layers),
        tuple(tensor for layer in layers for tensor in layer.tensors),
        tuple(one.factors.sent for one in sums),
        cost,
        tuple(one.numbers_of_rows for one in sums),
        layers[0].group,
    )


def _adamw(parameters: Sequence[TensorPart], size: int, mesh: Mesh) -> list[int]:
    held = [held_elements([tensor], mesh.shards) for tensor in parameters]
    each = [adamw_bytes([rows[shard] for rows in held], size) for shard in range(mesh.shards)]
    return [each[place.shard] for place in mesh.places]


def _sizes(model: nn.Module) -> tuple[int, int]:
    """Bytes of an element of a weight or gradient, and of state, which is float32 or wider."""
    dtype = next(model.parameters()).dtype
    return dtype.itemsize, 8 if dtype == DTYPES["float64"] else 4
