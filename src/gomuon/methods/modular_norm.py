"""ModularNorm: the dual step of the modular norm, layer by layer, each with its share of mass."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gomuon.functional.polar_factor import polar
from gomuon.geometry.base import Geometry
from gomuon.optimizer import MatrixOptimizer
from gomuon.parameters.groups import groups_of
from gomuon.parameters.routing import Route, RoutingTable
from gomuon.parameters.stacks import Stack
from gomuon.recipes.recipe import ModelUse, OfficialCode, Recipe
from gomuon.recipes.registry import register
from gomuon.recipes.stations import MUON, Group, aspect, lerp_momentum, measured_rms_scale, rate
from gomuon.recipes.work import Matrices, StepWork, Work, polar_work
from gomuon.settings import (
    INTERVAL,
    NOT_NEGATIVE,
    POSITIVE,
    Setting,
    one_of,
    optional,
    with_defaults,
)

_DUALS = {"embedding": "embedding: modular norm", "head": "output head: modular norm"}


def dual(X: Tensor, stack: Stack, group: Group) -> Tensor:
    """The step of norm one that is steepest for the source, by the kind of the layer.

    A linear layer: √(m/n)·polar(X). A convolution of k places: √(m/n)·polar(X)/k, for the m × n
    matrix of each place. An embedding: every row at the length √n; rows of zeros stay.
    """
    if group["norm"] == "embedding":
        row = torch.linalg.vector_norm(X, dim=-1, keepdim=True)
        return X * torch.where(row > 0, X.shape[-1] ** 0.5 / row, 0.0)
    k = group["kernel"]
    if X.shape[-1] % k:
        names = ", ".join(repr(layer.name) for layer in stack.layers[:3])
        raise ValueError(
            f"kernel={k} is not the number of places in the kernels of {names}, with "
            f"{X.shape[-1]} inputs in all; give convolutions with other kernels their own groups"
        )
    places = X.unflatten(-1, (-1, k)).movedim(-1, 1).flatten(0, 1)  # [b·k, m, n]
    D = aspect(places, clipped=False) / k * polar(places, group["polar"])
    return D.unflatten(0, (-1, k)).movedim(1, -1).flatten(-2)


def mass_scale(D: Tensor, stack: Stack, group: Group) -> Tensor:
    """The layer's share of the total mass, times D."""
    return group["mass"] / group["total_mass"] * D


def _is_whole(route: Route) -> bool:
    """Whether it is an embedding or a head that is neither tied nor divided among ranks."""
    own = {"embedding": ("embedding", ""), "head": ("output head (", ")")}
    begin, end = own.get(route.kind, ("\0", ""))
    if route.treatment != "adamw" or "tied to" in route.reason:
        return False
    return route.reason.startswith(begin) and route.reason.endswith(end) and ";" not in route.reason


def _all_as_matrices(model: nn.Module, table: RoutingTable) -> RoutingTable:
    return RoutingTable(
        replace(r, treatment="matrix", reason=_DUALS[r.kind]) if _is_whole(r) else r for r in table
    )


def _kind(route: Route) -> tuple[str, str, int]:
    """What layers of one group have in common: place in the model, norm, and kernel."""
    if route.reason in _DUALS.values():
        return route.kind, "embedding" if route.kind == "embedding" else "spectral", 1
    shape = route.parameter.shape
    places = shape[2:].numel() if route.reason.startswith("convolution") else 1
    return "hidden", "spectral", places


def _layers(route: Route) -> int:
    """1, or the number of matrices in a stack such as experts."""
    is_stack = not route.reason.startswith("convolution")
    return route.parameter.shape[:-2].numel() if is_stack else 1


def _groups_by_kind(table: RoutingTable, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Groups of layers with one norm and one mass. The masses of the whole model sum up to one."""
    matrices = table.treated("matrix")
    hidden = sum(_layers(route) for route in matrices if _kind(route)[0] == "hidden")
    outer = sum(_kind(route)[0] != "hidden" for route in matrices)
    mass, all_hidden = settings["mass"], settings["hidden_mass"]
    of_hidden = mass if all_hidden is None else all_hidden / max(1, hidden)
    total = hidden * of_hidden + outer * mass
    kinds: dict[tuple[str, str, int], list[tuple[str, Tensor]]] = {}
    for route in matrices:
        kinds.setdefault(_kind(route), []).append((route.name, route.parameter))
    own = [
        {
            "params": params,
            "treatment": "matrix",
            "norm": norm,
            "kernel": kernel,
            "mass": of_hidden if place == "hidden" else mass,
            "total_mass": total,
        }
        for (place, norm, kernel), params in kinds.items()
    ]
    others = groups_of(RoutingTable(r for r in table if r.treatment != "matrix"), settings)
    return [*own, *others]


def _step_work(x: Matrices, group: Group) -> Work:
    """A polar factor for every place of a kernel, or only the lengths of rows."""
    if group["norm"] == "embedding":
        return []
    k = group["kernel"]
    return polar_work(k * x.count, x.m, x.n // k, group["polar"], float64=x.float64)


RECIPE = Recipe(
    "ModularNorm",
    geometry=Geometry(),
    source=lerp_momentum,
    direction=dual,
    scale=mass_scale,
    rms_scale=measured_rms_scale,
    settings={
        **rate(0.1),
        **with_defaults(MUON, nesterov=False),
        "mass": Setting(1.0, NOT_NEGATIVE),
        "hidden_mass": Setting(None, optional(POSITIVE)),
        "total_mass": Setting(1.0, POSITIVE),
        "norm": Setting("spectral", one_of("spectral", "embedding")),
        "kernel": Setting(1, INTERVAL),
    },
    formula=(
        "D = share of mass × √(m/n)·polar(M); for embeddings rows of M at length √n; for each of "
        "the k places of a kernel √(m/n)·polar(M)/k"
    ),
    origin="Large et al. 2024 (arXiv 2405.14813), Bernstein & Newhouse 2024, jxbz/modula",
    official=(
        OfficialCode(
            "jxbz/modula, modula/atom.py (dualize)",
            theirs="momentum before dualize, all modules composed in a row",
        ),
    ),
    departures=(
        "Sensitivities of modules are taken as one; modula has them in its own layers.",
        "Momentum is ours; modula leaves it to the training loop.",
    ),
    model_use=ModelUse(route=_all_as_matrices, groups=_groups_by_kind),
    work=StepWork(_step_work),
)


@register
class ModularNorm(MatrixOptimizer):
    """The modular norm's dual step: every layer moves by its share of mass in its own norm.

    Linear layers and heads move by √(m/n)·polar(M); convolutions by √(m/n)·polar(M)/k at each of
    the k places of their kernel, m × n being outputs × inputs; embeddings, row by row, to the
    length √n. A layer's step is multiplied by its share of the total mass. `mass` is that of one
    layer, for single layers by `overrides`. With `hidden_mass` all hidden layers together have this
    mass, as the blocks of modula's GPT have 5. A model's groups get `total_mass`, `norm` and
    `kernel` from its layers; bare parameters count as linear layers. Tied embeddings stay AdamW's.

    What is our interpretation: momentum as Muon's, without Nesterov, and sensitivities of one, so
    residual branches are not weighed by depth.
    """

    recipe = RECIPE
