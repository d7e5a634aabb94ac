"""Gluon: layer-wise radii from measured smoothness."""

from typing import ClassVar

import torch
from torch import Tensor

from gomuon.functional.polar_factor import polar
from gomuon.geometry.base import Geometry
from gomuon.optimizer import MatrixOptimizer
from gomuon.parameters.stacks import Stack
from gomuon.parameters.state import Entries, FewNumbers, Memory
from gomuon.recipes.recipe import Recipe
from gomuon.recipes.registry import register
from gomuon.recipes.stations import MUON, Group, aspect_scale, lerp_momentum, rate
from gomuon.recipes.work import Kept, Matrices, StepWork, Work, momentum, plain_polar_work
from gomuon.settings import POSITIVE, WHOLE, Setting, with_defaults

_LAST = "last_gradient"


class MeasuredSmoothness(Geometry):
    """No maps; means, variance and covariance of measured norms and smoothness."""

    entries: ClassVar[Entries] = {_LAST: Memory(), "smoothness": FewNumbers(4)}


def polar_of_radius(X: Tensor, stack: Stack, group: Group) -> Tensor:
    """D = t·polar(X): t = 1 while smoothness is measured, then t = x/(L⁰ + L¹x) with x = ‖X‖_*.

    Smoothness is y = ‖G − G₋‖_*, the change of the gradient by a step with t = 1. The factor √(m/n)
    of the layer's norm and of its dual cancels in t.
    """
    D, steps = polar(X, group["polar"]), group["measure_steps"]
    x = _inner(X, D)
    last = stack.memory(_LAST)
    seen = stack.factor("smoothness", start=X.new_zeros(len(X), 1, 4))
    if 0 < stack.updates <= steps:
        change = stack.G - last
        y = _inner(change, polar(change, group["polar"]))
        stack.remember(seen, _with_one_more(seen, x, y, stack.updates))
    if stack.updates < steps:
        stack.remember(last, stack.G)
        return D
    return radius(seen, x, group["largest_radius"]) * D


def _with_one_more(seen: Tensor, x: Tensor, y: Tensor, number: int) -> Tensor:
    """The means of x and y, the variance of x and the covariance, with one observation more."""
    mean_x, mean_y, variance, covariance = seen.split(1, -1)
    new, by_x, by_y = 1 / number, x - mean_x, y - mean_y
    return torch.cat(
        [
            mean_x + new * by_x,
            mean_y + new * by_y,
            (1 - new) * (variance + new * by_x * by_x),
            (1 - new) * (covariance + new * by_x * by_y),
        ],
        dim=-1,
    )


def radius(seen: Tensor, x: Tensor, largest: float) -> Tensor:
    """t = x/(L⁰ + L¹x) of the least-squares line with L⁰ ≥ 0 and L¹ ≥ 0; 1 if nothing was seen."""
    mean_x, mean_y, variance, covariance = seen.split(1, -1)
    steepest = torch.where(mean_x > 0, mean_y / mean_x, 0.0)
    slope = torch.where(variance > 0, covariance / variance, steepest)
    slope = slope.clamp_min(0).minimum(steepest)
    smoothness = mean_y - slope * mean_x + slope * x
    return torch.where(smoothness > 0, x / smoothness, 1.0).clamp_max(largest)


def _inner(X: Tensor, Y: Tensor) -> Tensor:
    return (X * Y).sum(dim=(-2, -1), keepdim=True)


def _step_work(x: Matrices, group: Group) -> Work:
    """A polar factor; in the first `measure_steps` steps another one, which is not counted."""
    return plain_polar_work(x, group)


def _kept(x: Matrices, group: Group) -> Kept:
    """Momentum, the last gradient that was compared, and four numbers."""
    return {**momentum(x, group), _LAST: x.elements, "smoothness": 4 * x.count}


RECIPE = Recipe(
    "Gluon",
    geometry=MeasuredSmoothness(),
    source=lerp_momentum,
    direction=polar_of_radius,
    scale=aspect_scale,
    settings={
        **rate(0.02),
        **with_defaults(MUON, nesterov=False),
        "measure_steps": Setting(100, WHOLE),
        "largest_radius": Setting(10.0, POSITIVE),
    },
    formula="D = t·√(m/n)·polar(M), t = ‖M‖_*/(L⁰ + L¹‖M‖_*), L⁰ and L¹ measured for each layer",
    origin=(
        "Riabinin et al. 2025, arXiv 2505.13416: no code is public; how smoothness is measured in "
        "the run is our interpretation"
    ),
    work=StepWork(_step_work, keeps=_kept),
)


@register
class Gluon(MatrixOptimizer):
    """Gluon: every layer's step has the radius that its measured smoothness allows.

    The paper moves layer i by t = ‖M‖/(L⁰ + L¹‖M‖) in its norm, if the gradient changes by at most
    (L⁰ + L¹‖G‖) times the length of the step, all norms duals of the step's; it finds L⁰ and L¹ by
    a fit to a whole trajectory, and no code is public. Our interpretation measures within the run:
    the first `measure_steps` steps have the radius `lr`, as Scion's, and give pairs of ‖M‖ and of
    the gradient's change in one step, ‖G − G₋‖. Their least-squares line with L⁰, L¹ ≥ 0 is used
    from then on. It is in units of such a step, so that a schedule of `lr` still shortens steps.
    `largest_radius` bounds t. Defaults are ours. Radii are not measured again, because the change
    by another batch's noise, as a share of a shorter step, would shorten steps without end.
    """

    recipe = RECIPE
