"""Finds settings with which a method fits into the memory of a rank.

Settings are tried in one fixed order, and the first that fit are the answer. So nothing before them
fits, and more memory never leads to later ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from gomuon.geometry.moments_to_maps import alpha_of_sides
from gomuon.intervals import shortest
from gomuon.lab.costs.comparison import chosen_names
from gomuon.lab.costs.estimate import CostEstimate, RankLayout, estimate_cost
from gomuon.lab.costs.matrix_layers import part_of
from gomuon.lab.costs.planned_model import PlannedModel
from gomuon.lab.costs.traffic import held_elements, wrapper_bytes
from gomuon.lab.experiments import optimizers

Changes = dict[str, Any]

# In the order of the search: each is added to those before it. First what changes no number, then
# what was measured to cost little, then what leaves information out.
MEMORY_ORDER: tuple[tuple[str, Any], ...] = (
    ("offload", True),
    ("state_dtype", "bfloat16"),
    ("block_size", 1024),
    ("block_size", 512),
    ("block_size", 256),
    ("block_size", 128),
    ("state_dtype", "int8"),
    ("offload", "maps"),
    ("max_side", 4096),
    ("max_side", 1024),
    ("alpha", "inputs"),
)
# Only with a bound on the work, which these lower; each replaces the one before it. `refresh_every`
# is a multiple of the method's own.
WORK_ORDER: tuple[Mapping[str, int], ...] = (
    {},
    {"rows": 1024},
    {"rows": 256},
    {"rows": 256, "refresh_every": 2},
    {"rows": 256, "refresh_every": 4},
)
RESERVED = 0.25  # of the bound, if the user does not say how much


@dataclass(frozen=True)
class Bounds:
    """What a rank may use.

    Attributes:
        memory: bytes.
        reserve: bytes of it for activations and everything else that is not counted.
        share: the largest amortised work, as a share of the model's; None if it does not matter.
    """

    memory: int
    reserve: int
    share: float | None = None


@dataclass(frozen=True)
class Need:
    """Bytes that the busiest rank needs, by part.

    Attributes:
        weights: of the parameters that it holds.
        gradients: of the same.
        state: of the optimizer, on the device.
        sums: captured, at one time.
        messages: held while steps are sent; see `traffic.step_memory`.
        reserve: what the user keeps free.
    """

    weights: int
    gradients: int
    state: int
    sums: int
    messages: int
    reserve: int

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, int]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class FitCandidate:
    """One method with the settings that differ from its defaults, and what they need and cost."""

    changes: Changes
    need: Need
    estimate: CostEstimate
    model_flops: float

    @property
    def share(self) -> float:
        """Amortised work of the busiest rank, as a share of the model's."""
        return self.estimate.amortised.largest / self.model_flops

    @property
    def busiest_share(self) -> float:
        """The same of its busiest step."""
        steps = (self.estimate.reuse, self.estimate.refresh)
        return max(step.largest for step in steps if step is not None) / self.model_flops

    @property
    def busiest_bytes(self) -> float:
        """Most bytes that a rank sends in one step."""
        steps = (self.estimate.sent_reuse, self.estimate.sent_refresh)
        return max((step.largest for step in steps if step is not None), default=0.0)

    def fits(self, bounds: Bounds) -> bool:
        busy = bounds.share is not None and self.share > bounds.share
        return self.need.total <= bounds.memory and not busy

    def as_dict(self) -> dict[str, Any]:
        return {
            "settings": self.changes,
            "need": {**self.need.parts, "total": self.need.total},
            "on_host": self.estimate.offloaded.largest,
            "share_amortised": self.share,
            "share_busiest_step": self.busiest_share,
            "sent_busiest_step": self.busiest_bytes,
        }


@dataclass(frozen=True)
class Fit:
    """The answer for one method.

    Attributes:
        method: its name on the command line.
        defaults: the first candidate: the method's defaults, and what the user fixed.
        found: the first candidate that fits; None if none does.
        tried: how many candidates were tried.
        smallest: the candidate with the smallest need among those that were tried.
    """

    method: str
    defaults: FitCandidate
    found: FitCandidate | None
    tried: int
    smallest: FitCandidate

    def as_dict(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "fits": self.found is not None,
            "tried": self.tried,
            "defaults": self.defaults.as_dict(),
            "found": None if self.found is None else self.found.as_dict(),
            "smallest": self.smallest.as_dict(),
        }


@dataclass(frozen=True)
class Fitting:
    """The answers for all methods, and what they are measured against."""

    planned: PlannedModel
    ranks: RankLayout
    bounds: Bounds
    wrapper: int
    methods: tuple[Fit, ...]

    def as_dict(self) -> dict[str, Any]:
        return {
            "model": self.planned.name,
            "parameters": self.planned.parameters,
            "tokens": self.planned.tokens,
            "model_flops": self.planned.model_flops,
            "mesh": dataclasses.asdict(self.ranks.mesh),
            "replicate": self.ranks.replicate,
            "exact": self.ranks.exact,
            "bounds": dataclasses.asdict(self.bounds),
            "wrapper": self.wrapper,
            "methods": [fit.as_dict() for fit in self.methods],
        }


def fit_methods(
    planned: PlannedModel, ranks: RankLayout, names: str, bounds: Bounds, given: Changes
) -> Fitting:
    """The first settings that fit, for each of the methods `names`; `given` ones stay."""
    size = next(planned.model.parameters()).dtype.itemsize
    return Fitting(
        planned,
        ranks,
        bounds,
        wrapper_bytes(planned.held_parameters, ranks.mesh, weight_size=size, gradient_size=size),
        tuple(fit_method(name, planned, ranks, bounds, given) for name in chosen_names(names)),
    )


def fit_method(
    name: str, planned: PlannedModel, ranks: RankLayout, bounds: Bounds, given: Changes
) -> Fit:
    """The first settings with which one method fits."""
    defaults = smallest = None
    tried = 0
    for tried, candidate in enumerate(candidates(name, planned, ranks, bounds, given), 1):
        defaults = defaults or candidate
        if smallest is None or candidate.need.total < smallest.need.total:
            smallest = candidate
        if candidate.fits(bounds):
            return Fit(name, defaults, candidate, tried, smallest)
    assert defaults is not None
    assert smallest is not None
    return Fit(name, defaults, None, tried, smallest)


def candidates(
    name: str, planned: PlannedModel, ranks: RankLayout, bounds: Bounds, given: Changes
) -> Iterator[FitCandidate]:
    """Everything that may be tried, in order."""
    for changes in orders(name, given, work=bounds.share is not None):
        estimate = estimate_cost(name, planned, ranks, {**given, **changes})
        need = need_of(planned, ranks, estimate, bounds.reserve)
        yield FitCandidate(changes, need, estimate, planned.model_flops)


def orders(name: str, given: Mapping[str, Any], *, work: bool) -> Iterator[Changes]:
    """The settings to try, as changes of the method's defaults; the first changes nothing.

    A method is spared what it has no setting for, and what the user has `given`.
    """
    entry = optimizers.find(name)
    settings = {} if entry is None else {**entry.recipe.defaults, **entry.options}
    kinds = {} if entry is None else entry.recipe.settings
    own = {key: value for key, value in settings.items() if key not in given}
    for lower in _work_orders(own) if work else [{}]:
        changes: Changes = dict(lower)
        yield dict(changes)
        for setting, value in MEMORY_ORDER:
            if setting in own:
                step = _step(setting, value, {**own, **changes})
                if step and kinds[setting].kind.allows(step[setting]):
                    changes.update(step)
                    yield dict(changes)


def _step(setting: str, value: Any, now: Mapping[str, Any]) -> Changes:
    """The change of a setting; empty if it would not make anything smaller."""
    if setting in ("block_size", "max_side"):
        if now[setting] is not None and now[setting] <= value:
            return {}
        # A diagonal costs next to nothing, and keeps more than no factor at all.
        diagonal = {"long_sides": "diagonal"} if "long_sides" in now else {}
        return {setting: value, **(diagonal if setting == "max_side" else {})}
    if setting == "alpha":
        left, right = alpha_of_sides(now["alpha"])
        return {"alpha": (0.0, right)} if left > 0 and right > 0 else {}
    return {} if now[setting] == value else {setting: value}


def _work_orders(own: Mapping[str, Any]) -> list[Changes]:
    found: list[Changes] = []
    for order in WORK_ORDER:
        changes: Changes = {key: value for key, value in order.items() if key in own}
        if "refresh_every" in changes:
            changes["refresh_every"] *= shortest(own["refresh_every"])
        if "rows" in changes and own["rows"] is not None:
            changes["rows"] = min(changes["rows"], own["rows"])
        if changes not in found:
            found.append(changes)
    return found


def need_of(planned: PlannedModel, ranks: RankLayout, estimate: CostEstimate, reserve: int) -> Need:
    """What the busiest rank needs. Each part is that of its own busiest rank: an upper bound."""
    parameters, layout = list(planned.model.parameters()), planned.layout(ranks.exact)

    def held(chosen: list[nn.Parameter]) -> int:
        parts = [part_of(parameter, layout) for parameter in chosen]
        return max(held_elements(parts, ranks.mesh.shards)) * parameters[0].dtype.itemsize

    return Need(
        weights=held(parameters),
        gradients=held([p for p in parameters if p.requires_grad]),
        state=round(estimate.state.largest),
        sums=estimate.held,
        messages=round(estimate.messages.largest),
        reserve=reserve,
    )
