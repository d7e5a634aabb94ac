"""Shampoo: the scalable one, and as presets the original, Meta's and Google's."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from gomuon.functional.factors import Root, inverse_power
from gomuon.functional.linalg import decompose, identity_like, widened
from gomuon.functional.oracle import preconditioned
from gomuon.functional.product_roots import product_root
from gomuon.geometry.gradient_grams import GradientGrams, Prepared
from gomuon.optimizer import MatrixOptimizer
from gomuon.parameters.stacks import Stack
from gomuon.parameters.state import Entries, Memory
from gomuon.recipes.recipe import OfficialCode, Recipe
from gomuon.recipes.registry import register
from gomuon.recipes.stations import (
    AT_FIRST,
    MOMENTUM,
    OFFLOAD,
    ROOTS,
    Clock,
    Group,
    length,
    momentum_after,
    rate,
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
from gomuon.settings import (
    DECAY,
    FLAG,
    INTERVAL,
    NOT_NEGATIVE,
    ROTATED,
    SHARE,
    Setting,
    one_of,
    optional,
    with_defaults,
)


class ShampooGrams(GradientGrams):
    """Grams of gradients; the state also holds the average of gradients (`gradient_decay`)."""

    entries: ClassVar[Entries] = {**GradientGrams.entries, "filtered": Memory()}


def bias_correction(beta: float, observations: int, group: Group) -> float:
    """1 − β^t if averages that start from zero are corrected for it; a sum is not (β = 1)."""
    return 1 - beta**observations if group["bias_correction"] and beta < 1 else 1.0


def ridge_roots(observations: int, group: Group) -> tuple[Root, Prepared]:
    """(S + (ridge·λ_max + ε)·I)^(−power)."""
    corrected = bias_correction(group["factor_decay"], observations, group)

    def of_eigen(values: Tensor, V: Tensor) -> Tensor:
        largest = values.amax(-1, keepdim=True)
        ridge = group["ridge"] * largest + group["epsilon"]
        ridged = torch.where(largest > 0, values.clamp_min(0) + ridge, 1.0)
        return inverse_power(ridged, V, group["power"])

    def root(S: Tensor) -> Tensor:
        # In float64, because a ridge of 1e-6 is as small as the rounding errors of float32.
        return of_eigen(*decompose(torch.linalg.eigh, widened(S))).to(S.dtype)

    def multiplied(S: Tensor) -> tuple[Tensor, Tensor]:
        damped = S + group["epsilon"] * identity_like(S) if group["epsilon"] else S
        return product_root(damped, group["power"], group["ridge"])

    made = Root(root, multiplied, of_eigen)
    return made, lambda S: S if corrected == 1 else S / corrected


def filtered_gradient(stack: Stack, group: Group) -> Tensor:
    """F ← β₁F + (1−β₁)G, bias-corrected if asked for; G itself at β₁ = 0."""
    beta = group["gradient_decay"]
    if not beta:
        return stack.G
    average = stack.memory("filtered").lerp_(stack.G, 1 - beta)
    return average / bias_correction(beta, stack.updates + 1, group)


def grafted_preconditioning(X: Tensor, stack: Stack, group: Group) -> Tensor:
    """D = P_L X P_R rescaled to the length of another rule's step.

    Until there are maps, it is that rule's step itself.
    """
    left, right = stack.map("left_map"), stack.map("right_map")
    D = preconditioned(X, left, right)
    if group["graft"] is None:
        return D
    step = other_step(X, stack, group)
    if left is None:
        return step
    own, wanted = lengths(D, stack, group), lengths(step, stack, group)
    return D * torch.where(own > 0, wanted / own, 0.0)


def other_step(X: Tensor, stack: Stack, group: Group) -> Tensor:
    """The step of the rule whose length the direction is given: X, or X/√s with squares s of G."""
    if group["graft"] == "sgd":
        return X
    beta = 1.0 if group["graft"] == "adagrad" else group["factor_decay"]
    square = stack.memory("square")
    weight = 1.0 if beta == 1 else 1 - beta
    stack.remember(square, square.mul(beta).addcmul_(stack.G, stack.G, value=weight))
    corrected = square / bias_correction(beta, stack.updates + 1, group)
    return X / (corrected.sqrt() + 1e-10)


def lengths(X: Tensor, stack: Stack, group: Group) -> Tensor:
    """‖X‖_F, [b, 1, 1], of every block, or of the whole matrix that a block is cut from."""
    if group["graft_by"] == "block" or all(layer.blocks == 1 for layer in stack.layers):
        return length(X)
    parts = []
    for layer, squares in zip(stack.layers, stack.parts(length(X).square()), strict=True):
        of_matrix = squares.unflatten(0, (layer.tiling.stack, -1)).sum(1, keepdim=True)
        blocks = layer.blocks // layer.tiling.stack
        parts.append(of_matrix.expand(-1, blocks, -1, -1).flatten(0, 1))
    return torch.cat(parts).sqrt()


def _step_work(x: Matrices, group: Group) -> Work:
    """P_L X P_R."""
    return maps_work(x, True, True)


def _root_work(x: Matrices, group: Group) -> Work:
    return both_roots_work(x, group, group["power"], group["ridge"])


def _kept(x: Matrices, group: Group) -> Kept:
    square = {"square": x.elements} if group["graft"] in ("adagrad", "rmsprop") else {}
    filtered = {"filtered": x.elements} if group["gradient_decay"] else {}
    return {**momentum_factors_and_maps(x, group), **square, **filtered}


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "original": {
        "lr": 1.0,
        "momentum": 0.0,
        "nesterov": False,
        "factor_decay": 1.0,
        "start": 0.1,
        "ridge": 0.0,
        "graft": None,
        "refresh_every": 1,
        "block_size": None,
    },
    "distributed": {
        "lr": 1e-2,
        "gradient_decay": 0.9,
        "bias_correction": True,
        "momentum": 0.0,
        "nesterov": False,
        "factor_decay": 1.0,
        "ridge": 0.0,
        "epsilon": 1e-12,
        "graft": None,
        "refresh_every": 1,
        "refresh_at": "last",
        "block_size": 1024,
    },
    "google": {
        "lr": 0.1,  # ours: its code has no default
        "start": 1e-6,
        "graft": "sgd",
        "graft_by": "whole",
        "refresh_every": 1,
    },
}

RECIPE = Recipe(
    "Shampoo",
    geometry=ShampooGrams(ridge_roots, start="start"),
    clock=Clock(statistics="statistics_every", maps="refresh_every", at="refresh_at"),
    source=filtered_gradient,
    direction=grafted_preconditioning,
    scale=momentum_after,
    settings={
        # Grafting to RMSprop has no bias correction, and momentum adds up: first steps are long.
        **rate(1e-3),
        **with_defaults(MOMENTUM, momentum=0.9),
        **ROOTS,
        **OFFLOAD,
        "gradient_decay": Setting(0.0, DECAY),
        "bias_correction": Setting(False, FLAG),
        "factor_decay": Setting(0.999, SHARE),
        "start": Setting(0.0, NOT_NEGATIVE),
        "ridge": Setting(1e-6, NOT_NEGATIVE),
        "epsilon": Setting(0.0, NOT_NEGATIVE),
        "power": Setting(0.25, SHARE),
        "graft": Setting("rmsprop", one_of("sgd", "adagrad", "rmsprop", None)),
        "graft_by": Setting("block", one_of("block", "whole")),
        "statistics_every": Setting(1, INTERVAL),
        "refresh_every": Setting(10, ROTATED),
        **AT_FIRST,
        "block_size": Setting(1024, optional(INTERVAL)),
    },
    presets=PRESETS,
    formula="D = L^−¼ G R^−¼, grafted to the length of another rule's step, then momentum",
    origin="Anil et al. 2020, google-research/google-research scalable_shampoo",
    official=(
        OfficialCode(
            "google-research/google-research, scalable_shampoo/optax/distributed_shampoo.py",
            commit="e19012986e44d086bd033cd9ac5c8f95596226f2",
            ours={"preset": "google"},
            theirs=(
                "the same learning_rate and block_size, start_preconditioning_step=0, "
                "best_effort_shape_interpretation=False"
            ),
        ),
        OfficialCode(
            "facebookresearch/optimizers, distributed_shampoo/distributed_shampoo.py",
            commit="b91f46b4045d9fb251d3a6c60a9c1f0fc9f3b032",
            ours={"preset": "distributed"},
            theirs="use_merge_dims=False",
        ),
        OfficialCode(
            "tensorflow/tensorflow, tensorflow/contrib/opt/python/training/shampoo.py",
            commit="0771f37819c1077067340febad5a0d3abe8e561b",
            ours={"preset": "original"},
            theirs="max_matrix_size as large as the longest side",
        ),
    ),
    departures=(
        "Google's code takes the graft's own momentum in its first five steps by default; ours are "
        "preconditioned from the first on.",
    ),
    work=StepWork(_step_work, observe=gram_work, renew=_root_work, keeps=_kept),
)


@register
class Shampoo(MatrixOptimizer):
    """Shampoo: inverse roots of gradient Grams, grafted to another rule's length.

    `graft` is "sgd", "adagrad", "rmsprop" (whose average decays with `factor_decay`, as the Grams')
    or None. With `factor_decay=1` Grams are summed; they start at `start`·I. Roots are of
    S + (`ridge`·λ_max + `epsilon`)·I. `gradient_decay` averages gradients before they are
    preconditioned, `bias_correction` corrects averages that start from zero. Sides above
    `block_size` are cut into blocks of this size, each of them a matrix of its own; the last one is
    filled up with zeros. `graft_by` says whether the length of a block is grafted, or that of the
    whole matrix. `refresh_at="last"` refreshes at updates K, 2K, …; until then a step is the
    graft's own. `refresh_every=gomuon.Rotated(.01)` keeps the Grams' eigenbases, and renews one
    when it no longer fits (the criterion of "Purifying Shampoo").

    Three presets: "original" is Gupta et al. 2018 with the numbers of its first public code: sums
    that start at ε·I, no graft, no momentum. "distributed" has the defaults of Meta's Distributed
    Shampoo, "google" those of Google's Scalable Shampoo. Our own defaults are Google's with a graft
    to RMSprop and a refresh every 10 updates.
    """

    recipe = RECIPE
