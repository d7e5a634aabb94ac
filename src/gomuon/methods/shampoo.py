"""Scalable Shampoo."""

from functools import partial

import torch
from torch import Tensor

from gomuon.functional.factors import Root, inverse_power
from gomuon.functional.linalg import decompose, widened
from gomuon.functional.oracle import preconditioned
from gomuon.functional.product_roots import product_root
from gomuon.geometry.gradient_grams import GradientGrams, Prepared
from gomuon.optimizer import MatrixOptimizer
from gomuon.parameters.stacks import Stack
from gomuon.recipes.recipe import Recipe
from gomuon.recipes.registry import register
from gomuon.recipes.stations import (
    MOMENTUM,
    OFFLOAD,
    ROOTS,
    Clock,
    Group,
    gradient,
    length,
    momentum_after,
    rate,
    to_length,
)
from gomuon.recipes.work import (
    Kept,
    Matrices,
    StepWork,
    Work,
    both_roots_work,
    gram_work,
    maps_work,
    momentum_factors_and_maps,
)
from gomuon.settings import INTERVAL, NOT_NEGATIVE, ROTATED, SHARE, Setting, one_of, with_defaults


def ridge_roots(observations: int, group: Group) -> tuple[Root, Prepared]:
    """(S + ridge·λ_max·I)^(−power)."""

    def of_eigen(values: Tensor, V: Tensor) -> Tensor:
        largest = values.amax(-1, keepdim=True)
        ridged = torch.where(largest > 0, values.clamp_min(0) + group["ridge"] * largest, 1.0)
        return inverse_power(ridged, V, group["power"])

    def root(S: Tensor) -> Tensor:
        # In float64, because a ridge of 1e-6 is as small as the rounding errors of float32.
        return of_eigen(*decompose(torch.linalg.eigh, widened(S))).to(S.dtype)

    multiplied = partial(product_root, power=group["power"], shift=group["ridge"])
    return Root(root, multiplied, of_eigen), lambda S: S


def grafted_preconditioning(X: Tensor, stack: Stack, group: Group) -> Tensor:
    """D = P_L X P_R rescaled to the length of another rule's step."""
    D = preconditioned(X, stack.map("left_map"), stack.map("right_map"))
    rule = group["graft"]
    if rule is None:
        return D
    if rule == "sgd":
        return to_length(D, length(X))
    kept, weight = (1.0, 1.0) if rule == "adagrad" else (0.999, 0.001)
    square = stack.memory("square")
    stack.remember(square, square.mul(kept).addcmul_(X, X, value=weight))
    return to_length(D, length(X / (square.sqrt() + 1e-10)))


def _step_work(x: Matrices, group: Group) -> Work:
    """P_L X P_R."""
    return maps_work(x, True, True)


def _root_work(x: Matrices, group: Group) -> Work:
    return both_roots_work(x, group, group["power"], group["ridge"])


def _kept(x: Matrices, group: Group) -> Kept:
    kept = momentum_factors_and_maps(x, group)
    averages = group["graft"] in ("adagrad", "rmsprop")
    return {**kept, "square": x.elements} if averages else kept


RECIPE = Recipe(
    "Shampoo",
    geometry=GradientGrams(ridge_roots),
    clock=Clock(statistics="statistics_every", maps="refresh_every"),
    source=gradient,
    direction=grafted_preconditioning,
    scale=momentum_after,
    settings={
        # Grafting to RMSprop has no bias correction, and momentum adds up: first steps are long.
        **rate(1e-3),
        **with_defaults(MOMENTUM, momentum=0.9),
        **ROOTS,
        **OFFLOAD,
        "factor_decay": Setting(0.999, SHARE),
        "ridge": Setting(1e-6, NOT_NEGATIVE),
        "power": Setting(0.25, SHARE),
        "graft": Setting("rmsprop", one_of("sgd", "adagrad", "rmsprop", None)),
        "statistics_every": Setting(1, INTERVAL),
        "refresh_every": Setting(10, ROTATED),
        "block_size": Setting(1024, INTERVAL),
    },
    formula="D = L^−¼ G R^−¼, grafted to the length of another rule's step, then momentum",
    origin="Anil et al. 2020, google-research scalable_shampoo",
    work=StepWork(_step_work, observe=gram_work, renew=_root_work, keeps=_kept),
)


@register
class Shampoo(MatrixOptimizer):
    """Scalable Shampoo: inverse roots of gradient Grams, grafted to another rule's length.

    `graft` is "sgd", "adagrad", "rmsprop" or None. Sides above `block_size` are cut into blocks of
    this size, each of them a matrix of its own; the last one is filled up with zeros. With
    `factor_decay=1` Grams are summed. `refresh_every=gomuon.Rotated(.01)` keeps their eigenbases,
    and renews one when it no longer fits (the criterion of "Purifying Shampoo").
    """

    recipe = RECIPE
