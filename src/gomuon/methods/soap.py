"""SOAP: Adam in the slowly rotating eigenbasis of the gradient Grams."""

import math
from itertools import chain

from torch import Tensor

from gomuon.functional.oracle import preconditioned
from gomuon.functional.orthonormal import FIRST_STEPS
from gomuon.geometry.rotating_basis import RotatingBasis
from gomuon.intervals import Rotated
from gomuon.optimizer import MatrixOptimizer
from gomuon.parameters.stacks import Stack
from gomuon.recipes.recipe import OfficialCode, Recipe
from gomuon.recipes.registry import register
from gomuon.recipes.stations import ROOTS, STATE, Clock, Group, rate
from gomuon.recipes.work import (
    Decomposition,
    Kept,
    Matrices,
    Product,
    StepWork,
    Work,
    eigenbasis_work,
    maps_work,
    momentum_and_square,
    orthonormal_work,
)
from gomuon.settings import BETAS, DECAY, NOT_NEGATIVE, ROTATED, WHOLE, Setting


def adam_mean(stack: Stack, group: Group) -> Tensor:
    """M ← β₁M + (1−β₁)G, kept in the original coordinates."""
    return stack.memory("momentum").lerp_(stack.G, 1 - group["betas"][0])


def rotated_adam(X: Tensor, stack: Stack, group: Group) -> Tensor:
    """D = Q_L[(Q_LᵀMQ_R)/(√v + ε)]Q_Rᵀ, bias-corrected; v the average of (Q_LᵀGQ_R)²."""
    return bias_correction(stack, group) * from_bases(scaled_in_bases(X, stack, group), stack)


def scaled_in_bases(X: Tensor, stack: Stack, group: Group) -> Tensor:
    """(Q_LᵀXQ_R)/(√v + ε), in the coordinates of the bases; v the average of (Q_LᵀGQ_R)²."""
    v = stack.memory("square")
    stack.remember(v, v.lerp(into_bases(stack.G, stack).square(), 1 - group["betas"][1]))
    return into_bases(X, stack) / (v.sqrt() + group["eps"])


def into_bases(X: Tensor, stack: Stack) -> Tensor:
    """Q_LᵀXQ_R."""
    left = stack.map("left_basis")
    return preconditioned(X, None if left is None else left.mT, stack.map("right_basis"))


def from_bases(X: Tensor, stack: Stack) -> Tensor:
    """Q_L X Q_Rᵀ."""
    right = stack.map("right_basis")
    return preconditioned(X, stack.map("left_basis"), None if right is None else right.mT)


def bias_correction(stack: Stack, group: Group) -> float:
    """√(1 − β₂^s)/(1 − β₁^s) after s steps, which turns Adam's averages into means."""
    (beta1, beta2), s = group["betas"], stack.updates
    return math.sqrt(1 - beta2**s) / (1 - beta1**s)


def shrunk_with_weights(D: Tensor, stack: Stack, group: Group) -> Tensor:
    """(1 − lr·λ)·D: weight decay after the update also shortens the update."""
    return (1 - group["lr"] * group["weight_decay"]) * D


# ---- costs of all methods with rotating bases ----------------------------------------------------


def sides_of(x: Matrices, group: Group) -> list[tuple[str, int, int]]:
    """Name, length and the other length of the sides that have a basis."""
    both = [("left", x.m, x.n), ("right", x.n, x.m)]
    return [side for side in both if side[1] <= group["max_side"]]


def bases_work(x: Matrices, group: Group) -> Work:
    """A matrix into the bases, or back."""
    return maps_work(x, x.m <= group["max_side"], x.n <= group["max_side"])


def grams_work(x: Matrices, group: Group) -> Work:
    """GGᵀ and GᵀG."""
    return [Product(x.count, d, other, d) for _, d, other in sides_of(x, group)]


def rotation_work(x: Matrices, group: Group, *, is_sorted: bool = True) -> Work:
    """Each basis times its factor, for a power step and to sort its directions, and a QR.

    Before, with `Rotated`, QᵀLQ of every basis; here all of them are turned.
    """
    work: Work = []
    looks = 2 * isinstance(group["refresh_every"], Rotated)
    for _, d, _ in sides_of(x, group):
        work.append(Product((1 + is_sorted + looks) * x.count, d, d, d))
        if group["roots"] == "products":
            work += orthonormal_work(x.count, d)
        else:
            work.append(Decomposition(x.count, "qr", d, d))
    return work


def first_bases_work(x: Matrices, group: Group) -> Work:
    """The first step only observes, and finds the bases."""
    bases = [eigenbasis_work(x.count, d, group, FIRST_STEPS) for _, d, _ in sides_of(x, group)]
    return [*grams_work(x, group), *chain.from_iterable(bases)]


def factors_and_bases(x: Matrices, group: Group) -> Kept:
    return {
        f"{side}_{kind}": x.count * d * d
        for side, d, _ in sides_of(x, group)
        for kind in ("factor", "basis")
    }


def _step_work(x: Matrices, group: Group) -> Work:
    """G and M into the bases, and the step back."""
    return 3 * bases_work(x, group)


def kept_by_adam_in_bases(x: Matrices, group: Group) -> Kept:
    return {**momentum_and_square(x, group), **factors_and_bases(x, group)}


RECIPE = Recipe(
    "SOAP",
    geometry=RotatingBasis(),
    clock=Clock(maps="refresh_every"),
    source=adam_mean,
    direction=rotated_adam,
    scale=shrunk_with_weights,
    settings={
        **rate(3e-3),
        "betas": Setting((0.95, 0.95), BETAS),
        "eps": Setting(1e-8, NOT_NEGATIVE),
        "weight_decay": Setting(0.01, NOT_NEGATIVE),
        **STATE,
        "factor_decay": Setting(0.95, DECAY),
        "refresh_every": Setting(10, ROTATED),
        "max_side": Setting(10_000, WHOLE),
        **ROOTS,
    },
    formula="D = Q_L[(Q_Lᵀ M Q_R)/(√v + ε)]Q_Rᵀ, v the average of (Q_Lᵀ G Q_R)²",
    origin="Vyas et al. 2024, nikhilvyas/SOAP",
    official=(
        OfficialCode("nikhilvyas/SOAP, soap.py", commit="f42d296cb4146a67fbe811371e6badb9a39cc54d"),
    ),
    observes_first=1,
    work=StepWork(
        _step_work,
        observe=grams_work,
        renew=rotation_work,
        first=first_bases_work,
        keeps=kept_by_adam_in_bases,
    ),
)


@register
class SOAP(MatrixOptimizer):
    """SOAP: Adam in the slowly rotating eigenbasis of Shampoo's Grams.

    The first step only observes. Sides larger than `max_side` keep the identity. `roots` says how
    bases are found. "eigh" is an eigendecomposition at first and QR later, as published. "products"
    needs no decomposition: the first basis is an estimate by 20 steps of orthogonal iteration, and
    QR is Gram–Schmidt. "auto" is "products" on accelerators and "eigh" on the CPU.
    `refresh_every=gomuon.Rotated(.01)` turns a basis when it no longer fits its Gram (the criterion
    of "Purifying Shampoo").
    """

    recipe = RECIPE
