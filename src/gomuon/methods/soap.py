"""SOAP: Adam in the slowly rotating eigenbasis of the gradient Grams."""

import math
from collections.abc import Sequence
from itertools import chain
from typing import ClassVar

import torch
from torch import Tensor

from gomuon.functional.factors import takes_products
from gomuon.functional.linalg import decompose, full_float32, over_batch
from gomuon.functional.oracle import preconditioned
from gomuon.functional.orthonormal import FIRST_STEPS, eigenbasis, orthonormalised
from gomuon.geometry.base import Geometry
from gomuon.optimizer import MatrixOptimizer
from gomuon.parameters.layers import Layer
from gomuon.parameters.stacks import Stack
from gomuon.parameters.state import Entries, both_sides
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
from gomuon.settings import BETAS, DECAY, INTERVAL, NOT_NEGATIVE, WHOLE, Setting


class RotatingBasis(Geometry):
    """Q_L, Q_R: eigenvectors at first, then one power step and QR every `refresh_every` steps.

    All of this happens after the update, with the gradient of the update. By products, eigenvectors
    are estimated by orthogonal iteration (`eigenbasis`), and QR is Gram–Schmidt
    (`orthonormalised`). Its columns may have other signs, which changes no step: the momentum is
    kept in the original coordinates, and the second moment holds squares.
    """

    description = "gradient Gram moments and their eigenbasis"
    acts_after = True
    entries: ClassVar[Entries] = {
        **both_sides("factor", numbers="semidefinite"),
        **both_sides("basis", numbers="cosines"),
    }

    def after(self, due: Sequence[Layer], stacks: Sequence[Stack], group: Group) -> None:
        for stack in stacks:
            for side, G in (("left", stack.G), ("right", stack.G.mT)):
                if G.shape[-2] <= group["max_side"]:
                    _update_basis(stack, side, G @ G.mT, group, rotate=bool(due))
            stack.close()


def _update_basis(stack: Stack, side: str, gram: Tensor, group: Group, *, rotate: bool) -> None:
    factor = stack.factor(f"{side}_factor", start=torch.zeros_like(gram))
    stack.remember(factor, factor.lerp(gram, 1 - group["factor_decay"]))
    basis = stack.map(f"{side}_basis")
    products = takes_products(group["roots"], factor.device)
    if basis is None:
        stack.set(f"{side}_basis", _first_basis(factor, products=products))
    elif rotate:
        _rotate(stack, side, factor, basis, products=products)


def _first_basis(factor: Tensor, *, products: bool) -> Tensor:
    """Eigenvectors, those of the largest eigenvalues first."""
    if not products:
        return decompose(torch.linalg.eigh, factor)[1].flip(-1)
    with full_float32():
        return eigenbasis(factor, FIRST_STEPS)[1]


def _rotate(stack: Stack, side: str, factor: Tensor, basis: Tensor, *, products: bool) -> None:
    """One power step. The directions are sorted; the second moment is sorted in the same way."""
    estimate = (basis * (factor @ basis)).sum(-2)  # diag(QᵀLQ)
    order = estimate.argsort(dim=-1, descending=True)
    ordered = torch.take_along_dim(basis, order.unsqueeze(-2), dim=-1)
    if products:
        with full_float32():
            rotated = orthonormalised(factor @ ordered)
    else:
        rotated = over_batch(lambda part: torch.linalg.qr(part), factor @ ordered)[0]
    # If the power step overflows, the basis keeps its directions, in the new order.
    stack.set(f"{side}_basis", stack.usable(rotated, ordered))
    square = stack.memory("square")
    index = order.unsqueeze(-1) if side == "left" else order.unsqueeze(-2)
    square.copy_(torch.take_along_dim(square, index, dim=-2 if side == "left" else -1))


def adam_mean(stack: Stack, group: Group) -> Tensor:
    """M ← β₁M + (1−β₁)G, kept in the original coordinates."""
    return stack.memory("momentum").lerp_(stack.G, 1 - group["betas"][0])


def rotated_adam(X: Tensor, stack: Stack, group: Group) -> Tensor:
    """D = Q_L[(Q_LᵀMQ_R)/(√v + ε)]Q_Rᵀ, bias-corrected; v the average of (Q_LᵀGQ_R)²."""
    (beta1, beta2), s = group["betas"], stack.updates
    left, right = stack.map("left_basis"), stack.map("right_basis")
    transposed = (None if left is None else left.mT, None if right is None else right.mT)

    def rotate(Y: Tensor) -> Tensor:
        return preconditioned(Y, transposed[0], right)

    v = stack.memory("square")
    stack.remember(v, v.lerp(rotate(stack.G).square(), 1 - beta2))
    step = rotate(X) / (v.sqrt() + group["eps"])
    correction = math.sqrt(1 - beta2**s) / (1 - beta1**s)
    return correction * preconditioned(step, left, transposed[1])


def shrunk_with_weights(D: Tensor, stack: Stack, group: Group) -> Tensor:
    """(1 − lr·λ)·D: weight decay after the update also shortens the update."""
    return (1 - group["lr"] * group["weight_decay"]) * D


def _sides(x: Matrices, group: Group) -> list[tuple[str, int, int]]:
    """Name, length and the other length of the sides that have a basis."""
    both = [("left", x.m, x.n), ("right", x.n, x.m)]
    return [side for side in both if side[1] <= group["max_side"]]


def _step_work(x: Matrices, group: Group) -> Work:
    """G and M into the bases, and the step back."""
    left, right = x.m <= group["max_side"], x.n <= group["max_side"]
    return 3 * maps_work(x, left, right)


def _gram_work(x: Matrices, group: Group) -> Work:
    return [Product(x.count, d, other, d) for _, d, other in _sides(x, group)]


def _rotation_work(x: Matrices, group: Group) -> Work:
    """Each basis times its factor, twice, and a QR."""
    work: Work = []
    for _, d, _ in _sides(x, group):
        work.append(Product(2 * x.count, d, d, d))
        if group["roots"] == "products":
            work += orthonormal_work(x.count, d)
        else:
            work.append(Decomposition(x.count, "qr", d, d))
    return work


def _first_work(x: Matrices, group: Group) -> Work:
    """The first step only observes, and finds the bases."""
    bases = [eigenbasis_work(x.count, d, group, FIRST_STEPS) for _, d, _ in _sides(x, group)]
    return [*_gram_work(x, group), *chain.from_iterable(bases)]


def _kept(x: Matrices, group: Group) -> Kept:
    bases = {
        f"{side}_{kind}": x.count * d * d
        for side, d, _ in _sides(x, group)
        for kind in ("factor", "basis")
    }
    return {**momentum_and_square(x, group), **bases}


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
        "refresh_every": Setting(10, INTERVAL),
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
        _step_work, observe=_gram_work, renew=_rotation_work, first=_first_work, keeps=_kept
    ),
)


@register
class SOAP(MatrixOptimizer):
    """SOAP: Adam in the slowly rotating eigenbasis of Shampoo's Grams.

    The first step only observes. Sides larger than `max_side` keep the identity. `roots` says how
    bases are found. "eigh" is an eigendecomposition at first and QR later, as published. "products"
    needs no decomposition: the first basis is an estimate by 20 steps of orthogonal iteration, and
    QR is Gram–Schmidt. "auto" is "products" on accelerators and "eigh" on the CPU.
    """

    recipe = RECIPE
