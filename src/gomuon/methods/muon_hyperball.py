"""MuonHyperball: Muon on the sphere of the weights' first norm."""

from typing import ClassVar

import torch
from torch import Tensor

from gomuon.functional import linalg
from gomuon.geometry.base import Geometry
from gomuon.optimizer import MatrixOptimizer
from gomuon.parameters.stacks import Stack
from gomuon.parameters.state import Entries, FewNumbers
from gomuon.recipes.recipe import OfficialCode, Recipe
from gomuon.recipes.registry import register
from gomuon.recipes.stations import STATE, Group, heavy_ball_momentum, length, plain_polar, rate
from gomuon.recipes.work import Kept, Matrices, StepWork, momentum, plain_polar_work
from gomuon.settings import DECAY, FLAG, POLAR, Setting


class Sphere(Geometry):
    """No maps; the weights' first norm is kept."""

    reads_weights = True
    entries: ClassVar[Entries] = {"radius": FewNumbers(lowest=0.0)}


def _weights(stack: Stack) -> Tensor:
    if all(layer.has_weights for layer in stack.layers):
        return stack.W
    return torch.zeros_like(stack.G)  # when state is allocated


def _radius(stack: Stack, W: Tensor) -> Tensor:
    """‖W₀‖_F, [b, 1, 1]."""
    is_new = any("radius" not in layer.state for layer in stack.layers)
    radius = stack.factor("radius", start=length(W))
    # On an accelerator this would wait.
    if is_new and linalg.decomposes_well(W.device) and not bool((radius > 0).all()):
        for layer in stack.layers:
            if layer.has_weights and not bool(length(layer.weights).all()):
                raise ValueError(
                    f"the weights of {layer.name!r} are zero, and MuonHyperball keeps their norm, "
                    "so they would stay zero; initialise them with other numbers, or leave them to "
                    f'AdamW with routes={{{layer.name!r}: "adamw"}}'
                )
    return radius


def chord(D: Tensor, stack: Stack, group: Group) -> Tensor:
    """U such that W − lr·U = r·Norm(W − lr·r·Norm(D)), for W on the sphere of radius r.

    With w = W/r and u = Norm(D) it is r·[w·(lr·‖u‖² − 2⟨w, u⟩)/(p(p + 1)) + u/p] for
    p = ‖w − lr·u‖, which holds for lr = 0 and for D = 0 as well.
    """
    W, lr = _weights(stack), group["lr"]
    r, w, u = _radius(stack, W), _normalised(W), _normalised(D)
    inner, square = _inner(w, u), _inner(u, u)
    p = (1 - 2 * lr * inner + lr**2 * square).clamp_min(1e-20).sqrt()
    return r * (w * ((lr * square - 2 * inner) / (p * (p + 1))) + u / p)


def onto_sphere(stack: Stack, group: Group) -> tuple[float | Tensor, Tensor | None]:
    """W ← r·Norm(W): it is on the sphere already, but for rounding. At lr = 0 nothing moves."""
    W = _weights(stack)
    return 1.0, (group["lr"] > 0) * (W - _radius(stack, W) * _normalised(W))


def _normalised(X: Tensor) -> Tensor:
    norm = length(X)
    return X * torch.where(norm > 0, norm.reciprocal(), 0.0)


def _inner(X: Tensor, Y: Tensor) -> Tensor:
    return (X * Y).sum(dim=(-2, -1), keepdim=True)


def _kept(x: Matrices, group: Group) -> Kept:
    """Momentum and radii."""
    return {**momentum(x, group), "radius": x.count}


RECIPE = Recipe(
    "MuonHyperball",
    geometry=Sphere(),
    source=heavy_ball_momentum,
    direction=plain_polar,
    scale=chord,
    decay=onto_sphere,
    settings={
        **rate(0.01),
        "momentum": Setting(0.95, DECAY),
        "nesterov": Setting(False, FLAG),
        **STATE,
        "polar": Setting("auto", POLAR),
    },
    formula="W ← r·Norm(W − η·r·Norm(polar(M))), r = ‖W₀‖_F",
    origin="Wen et al. 2025, Hyperball Optimization (whenwen.github.io); code in microsoft/dion",
    official=(
        OfficialCode("microsoft/dion, dion/muonh.py", "3c15037dc716afaea1788f471a4ca75cffc7089b"),
    ),
    departures=(
        "A convolution is one matrix; the code's default normalises the last two sides alone.",
    ),
    work=StepWork(plain_polar_work, keeps=_kept),
)


@register
class MuonHyperball(MatrixOptimizer):
    """Muon with hyperball normalisation (MuonH): weights stay on the sphere of their first norm.

    `lr` is the length of a step as a share of the weights' norm, before the step is brought back to
    the sphere. There is no weight decay. Weights that are zero at first are refused (on an
    accelerator they stay zero). Heads, fused parts and experts each have a sphere of their own.
    """

    recipe = RECIPE
