"""A whole plan: a model, its ranks, and the figures of several methods side by side."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from gomuon.lab.costs.method_cost import Forecast, Ranks, forecast
from gomuon.lab.costs.planned_model import Subject
from gomuon.lab.errors import LabError
from gomuon.routing import route
from gomuon.traffic import Mesh, wrapper_bytes

OPTIMIZERS = "go-muon,muon,shampoo,kfac"
ACCELERATOR_POLAR = "polar-express"  # what "auto" takes there


@dataclass(frozen=True)
class Treated:
    """Parameters that are treated alike for one reason."""

    treatment: str
    reason: str
    tensors: int
    parameters: int


@dataclass(frozen=True)
class Outlook:
    """Everything `gomuon plan` shows.

    Attributes:
        model: its name.
        parameters: how many it has.
        treated: them by treatment, as the routing table has it.
        dtype: of weights and gradients.
        tokens: per rank and step.
        mesh: the ranks.
        replicate: every rank does all the work.
        shares: whether a forward pass showed which layers share an input.
        model_flops: of the forward and backward pass of one rank and step.
        wrapper: bytes DDP or FSDP2 itself sends from one rank in a step.
        methods: the figures.
    """

    model: str
    parameters: int
    treated: tuple[Treated, ...]
    dtype: str
    tokens: int
    mesh: Mesh
    replicate: bool
    shares: bool
    model_flops: float
    wrapper: int
    methods: tuple[Forecast, ...]

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def outlook(
    subject: Subject,
    mesh: Mesh,
    names: str = OPTIMIZERS,
    *,
    replicate: bool = False,
    refresh_every: int | None = None,
    token_stride: int | None = None,
    polar: str = ACCELERATOR_POLAR,
) -> Outlook:
    """The plan of a subject; what is None is each method's own."""
    changes: dict[str, Any] = {
        "refresh_every": refresh_every,
        "token_stride": token_stride,
        "polar": polar,
    }
    weight = next(subject.model.parameters()).dtype
    given = {name: value for name, value in changes.items() if value is not None}
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    if not chosen:
        raise LabError(f"--optimizers {names!r} names none; write them as {OPTIMIZERS}")
    ranks = Ranks(mesh, replicate)
    size = weight.itemsize
    return Outlook(
        subject.name,
        subject.parameters,
        treated(subject),
        str(weight).removeprefix("torch."),
        subject.tokens,
        mesh,
        replicate,
        subject.readings is not None,
        subject.model_flops,
        wrapper_bytes(subject.parameters, mesh, weight_size=size, gradient_size=size),
        tuple(forecast(name, subject, ranks, given) for name in dict.fromkeys(chosen)),
    )


def treated(subject: Subject) -> tuple[Treated, ...]:
    """Parameters by treatment and reason, in the routing table's order."""
    try:
        table = route(subject.model)
    except ValueError as error:
        raise LabError(f"{subject.name!r} cannot be planned for: {error}") from error
    sums: dict[tuple[str, str], tuple[int, int]] = {}
    for entry in table:
        key = entry.treatment, entry.reason
        tensors, parameters = sums.get(key, (0, 0))
        sums[key] = tensors + 1, parameters + entry.parameter.numel()
    order = {"matrix": 0, "adamw": 1, "frozen": 2}
    rows = [Treated(*key, *counts) for key, counts in sums.items()]
    return tuple(sorted(rows, key=lambda row: order[row.treatment]))
