"""Scion: the linear minimisation oracle of one norm for hidden layers, of another for the head."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gomuon.functional.polar_factor import polar
from gomuon.geometry.base import Geometry
from gomuon.optimizer import MatrixOptimizer
from gomuon.parameters.groups import groups_of
from gomuon.parameters.layers import Layer
from gomuon.parameters.routing import RoutingTable
from gomuon.parameters.stacks import Stack
from gomuon.recipes.recipe import ModelUse, OfficialCode, Recipe
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
    """D times the radius of the norm ball, and if the norm is spectral, times √(out/in)/k².

    k² is the number of elements of a convolution's kernel, otherwise one: then that is √(m/n).
    """
    if group["norm"] == "sign":
        return group["radius"] * D
    lengths = [kernel_factor(layer) for layer in stack.layers for _ in range(layer.blocks)]
    if len(set(lengths)) == 1:  # no tensor, which would be copied to the device
        return group["radius"] * lengths[0] * aspect(D, clipped=False) * D
    longer = torch.cat([D.new_full((1, 1, 1), length) for length in lengths])
    return group["radius"] * aspect(D, clipped=False) * longer * D


def kernel_factor(layer: Layer) -> float:
    """√(out/in)/k² over √(m/n): an input (transposed: an output) channel has k² of the columns."""
    if layer.spec.stack:
        return 1.0
    kernel = math.prod(layer.own_shape[2:])
    return float(kernel ** (-1.5 if layer.spec.transposed else -0.5))


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
        **with_defaults(MUON, momentum=0.0, nesterov=False),
        "constrained": Setting(True, FLAG),
        "radius": Setting(1.0, NOT_NEGATIVE),
        "head_radius": Setting(1.0, NOT_NEGATIVE),
        "norm": Setting("spectral", one_of("spectral", "sign")),
    },
    formula="D = radius·√(m/n)·polar(M); sign(M)/n for the output head",
    origin="LIONS-EPFL/scion; its momentum is our 1 − β",
    official=(
        OfficialCode(
            "LIONS-EPFL/scion, scion.py",
            commit="a86f93e67d052068cc83f769ad0b833c867280fc",
            theirs='norm="Sign" in the head\'s group, and momentum=1 − ours',
        ),
    ),
    departures=(
        "Biases, norms and embeddings are updated by AdamW, and nothing is initialised anew.",
        "Each group of a grouped convolution is a matrix of its own.",
    ),
    model_use=ModelUse(route=_head_as_matrix, groups=_head_in_its_own_group),
    work=StepWork(_step_work),
)


@register
class Scion(MatrixOptimizer):
    """Scion: the LMO of the spectral norm for hidden layers, of the sign norm for the head.

    `constrained=True` multiplies the weights by 1 − lr, which keeps them in the norm ball. `radius`
    and `head_radius` are the radii of the two balls. Convolutions with a k × k kernel have the
    length √(out/in)/k². Bare parameters all count as hidden layers.

    As in the public code, steps are constrained and without momentum by default; its examples set a
    `momentum` of .9.
    """

    recipe = RECIPE
