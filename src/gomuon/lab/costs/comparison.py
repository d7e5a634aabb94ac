"""The costs of several methods on one model, compared: all that `gomuon plan` shows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gomuon.lab.costs.estimate import CostEstimate, RankLayout, estimate_cost
from gomuon.lab.costs.planned_model import PlannedModel
from gomuon.lab.costs.traffic import Mesh, wrapper_bytes
from gomuon.lab.errors import LabError
from gomuon.parameters.routing import route

OPTIMIZERS = "go-muon,muon,shampoo,kfac"
ACCELERATOR_POLAR = "fast"


@dataclass(frozen=True)
class TreatmentCount:
    """How many parameters get one treatment for one reason."""

    treatment: str
    reason: str
    tensors: int
    parameters: int


@dataclass(frozen=True)
class CostComparison:
    """Everything `gomuon plan` shows.

    Attributes:
        model: its name.
        parameters: how many it has.
        treated: the same by treatment, from the routing table.
        dtype: of weights and gradients.
        tokens: per rank and step.
        mesh: the ranks.
        replicate: whether every rank computes everything.
        exact: whether whole matrices are gathered of the parts that tensor parallelism makes.
        shares: whether a forward pass was made to find the layers that share an input.
        model_flops: of the forward and backward pass of one rank and step.
        wrapper: bytes that DDP or FSDP2 itself sends from one rank in a step.
        methods: the costs of each method.
    """

    model: str
    parameters: int
    treated: tuple[TreatmentCount, ...]
    dtype: str
    tokens: int
    mesh: Mesh
    replicate: bool
    exact: bool
    shares: bool
    model_flops: float
    wrapper: int
    methods: tuple[CostEstimate, ...]

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def chosen_names(names: str) -> list[str]:
    """The names of --optimizers, each once."""
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    if not chosen:
        raise LabError(f"--optimizers {names!r} has no names; write for example {OPTIMIZERS}")
    return list(dict.fromkeys(chosen))


def given_settings(
    *,
    refresh_every: int | None = None,
    rows: int | None = None,
    token_stride: int | None = None,
    polar: str = ACCELERATOR_POLAR,
    state_dtype: str | None = None,
    offload: str | None = None,
    stagger: bool | None = None,
    sums_dtype: str | None = None,
) -> dict[str, Any]:
    """The settings that a user gave, for methods that have them; None means the method's own."""
    changes: dict[str, Any] = {
        "refresh_every": refresh_every,
        "rows": rows,
        "token_stride": token_stride,
        "polar": polar,
        "state_dtype": state_dtype,
        "offload": {"factors": True}.get(offload or "", offload),
        "stagger": stagger,
        "sums_dtype": sums_dtype,
    }
    return {name: value for name, value in changes.items() if value is not None}


def compare_costs(
    planned: PlannedModel,
    ranks: RankLayout,
    names: str = OPTIMIZERS,
    given: Mapping[str, Any] | None = None,
) -> CostComparison:
    """The costs of the methods `names` on a model, with the settings `given_settings` returns."""
    changes = given_settings() if given is None else dict(given)
    weight = next(planned.model.parameters()).dtype
    chosen = chosen_names(names)
    mesh, size = ranks.mesh, weight.itemsize
    return CostComparison(
        planned.name,
        planned.parameters,
        count_treatments(planned),
        str(weight).removeprefix("torch."),
        planned.tokens,
        mesh,
        ranks.replicate,
        ranks.exact,
        planned.uses is not None,
        planned.model_flops,
        wrapper_bytes(planned.held_parameters, mesh, weight_size=size, gradient_size=size),
        tuple(estimate_cost(name, planned, ranks, changes) for name in chosen),
    )


def count_treatments(planned: PlannedModel) -> tuple[TreatmentCount, ...]:
    """Parameters by treatment and reason, in the routing table's order."""
    try:
        table = route(planned.model, planned.routes)
    except ValueError as error:
        raise LabError(f"the costs of {planned.name!r} cannot be estimated: {error}") from error
    sums: dict[tuple[str, str], tuple[int, int]] = {}
    for entry in table:
        key = entry.treatment, entry.reason
        tensors, parameters = sums.get(key, (0, 0))
        sums[key] = tensors + 1, parameters + entry.parameter.numel()
    order = {"matrix": 0, "adamw": 1, "frozen": 2}
    rows = [TreatmentCount(*key, *counts) for key, counts in sums.items()]
    return tuple(sorted(rows, key=lambda row: order[row.treatment]))
