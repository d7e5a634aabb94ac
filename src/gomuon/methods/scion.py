"""Scion: the linear minimisation oracle of one norm for hidden layers, of another for the head."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from gomuon.functional.polar_factor import polar
from gomuon.geometry.base import Geometry
from gomuon.optimizer import MatrixOptimizer
from gomuon.parameters.groups import groups_of
from gomuon.parameters.routing import RoutingTable
from gomuon.parameters.stacks import Stack
from gomuon.recipes.recipe import ModelUse, Recipe
from gomuon.recipes.registry import register
from gomuon.recipes.stations import (
    MUON,
    Group,
    aspect,
    lerp_momentum,
    measured_rms_scale,
    rate,
    rms_scale,
)
from gomuon.recipes.work import Matrices, StepWork, Work, plain_polar_work
from gomuon.settings import FLAG, NOT_NEGATIVE, Setting, one_of, with_defaults

_SIGN = "output head: sign"


def polar_or_sign(X: Tensor, stack: Stack, group: Group) -> Tensor:
    """The oracle of the group's norm: the polar factor, or sign(X)/n for an output head."""
    return X.sign() / X.shape[-1] if group["norm"] == "sign" else polar(X, group["polar"])


def radius_scale(D: Tensor, stack: Stack, group: Group) -> Tensor:
    """D times the radius of the norm ball, and times √(m/n) if the norm is spectral."""
    return group["radius"] * (1.0 if group["norm"] == "sign" else aspect(D, clipped=False)) * D


def rms_or_sign(D: Tensor, stack: Stack, group: Group) -> Tensor:
    """AdamW's root mean square for either norm; radii play no part."""
    return (measured_rms_scale if group["norm"] == "sign" else rms_scale)(D, stack, group)


def constrained_or_decayed(stack: Stack, group: Group) -> tuple[float | Tensor, Tensor | None]:
    """W ← (1 − lr)W, which keeps W in the norm ball, or plain decay."""
    return 1 - group["lr"] * (1.0 if group["constrained"] else group["weight_decay"]), None


def _is_whole_head(reason: str) -> bool:
    """Whether it is a head that is neither tied nor divided among ranks."""
    return reason.startswith("output head (") and reason.endswith(")")


def _head_as_matrix(model: nn.Module, table: RoutingTable) -> RoutingTable:
    return RoutingTable(
        replace(r, treatment="matrix", reason=_SIGN) if _is_whole_head(r.reason) else r
        for r in table
    )


def _head_in_its_own_group(
    table: RoutingTable, settings: Mapping[str, Any]
) -> list[dict[str, Any]]:
    heads = [r for r in table if r.reason == _SIGN]
    others = groups_of(RoutingTable(r for r in table if r.reason != _SIGN), settings)
    own = {
        "params": [(r.name, r.parameter) for r in heads],
        "treatment": "matrix",
        "norm": "sign",
        "radius": settings["head_radius"],
    }
    return [*others, own] if heads else others


def _step_work(x: Matrices, group: Group) -> Work:
    """A polar factor, or only signs."""
    return [] if group["norm"] == "sign" else plain_polar_work(x, group)


RECIPE = Recipe(
    "Scion",
    geometry=Geometry(),
    source=lerp_momentum,
    direction=polar_or_sign,
    scale=radius_scale,
    rms_scale=rms_or_sign,
    decay=constrained_or_decayed,
    settings={
        **rate(1e-3),
        **with_defaults(MUON, momentum=0.9, nesterov=False),
        "constrained": Setting(False, FLAG),
        "radius": Setting(1.0, NOT_NEGATIVE),
        "head_radius": Setting(1.0, NOT_NEGATIVE),
        "norm": Setting("spectral", one_of("spectral", "sign")),
    },
    formula="D = radius·√(m/n)·polar(M); sign(M)/n for the output head",
    origin="LIONS-EPFL/scion; its momentum is our 1 − β",
    model_use=ModelUse(route=_head_as_matrix, groups=_head_in_its_own_group),
    work=StepWork(_step_work),
)


@register
class Scion(MatrixOptimizer):
    """Scion: the LMO of the spectral norm for hidden layers, of the sign norm for the head.

    `constrained=True` multiplies the weights by 1 − lr, which keeps them in the norm ball. `radius`
    and `head_radius` are the radii of the two balls. Bare parameters all count as hidden layers.
    """

    recipe = RECIPE
