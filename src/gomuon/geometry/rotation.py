"""SOAP's slowly rotating eigenbasis of the gradient Grams."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gomuon.functional.linalg import decompose, over_batch
from gomuon.geometry.base import Geometry, Group, due
from gomuon.stacks import Stack


class RotatingBasis(Geometry):
    """Q_L, Q_R: eigenvectors at first, then one power step and QR every `refresh_every` steps.

    Everything happens after the update, with the gradient the update was made of.
    """

    description = "gradient Gram moments and their eigenbasis"

    def after(self, stacks: Sequence[Stack], group: Group) -> None:
        for stack in stacks:
            for side, G in (("left", stack.G), ("right", stack.G.mT)):
                if G.shape[-2] <= group["max_side"]:
                    _follow(stack, side, G @ G.mT, group)


def _follow(stack: Stack, side: str, gram: Tensor, group: Group) -> None:
    factor = stack.factor(f"{side}_factor", start=torch.zeros_like(gram))
    stack.remember(factor, factor.lerp(gram, 1 - group["factor_decay"]))
    basis = stack.map(f"{side}_basis")
    if basis is None:
        _, vectors = decompose(torch.linalg.eigh, factor)
        stack.set(f"{side}_basis", vectors.flip(-1))
    elif due(group):
        _rotate(stack, side, factor, basis)


def _rotate(stack: Stack, side: str, factor: Tensor, basis: Tensor) -> None:
    """One power step; the second moment follows its directions as they change places."""
    estimate = (basis * (factor @ basis)).sum(-2)  # diag(QᵀLQ)
    order = estimate.argsort(dim=-1, descending=True)
    ordered = torch.take_along_dim(basis, order.unsqueeze(-2), dim=-1)
    rotated = over_batch(lambda part: torch.linalg.qr(part), factor @ ordered)[0]
    # Where the power step overflows, the basis keeps its directions, in their new places.
    stack.set(f"{side}_basis", stack.usable(rotated, ordered))
    square = stack.memory("square")
    index = order.unsqueeze(-1) if side == "left" else order.unsqueeze(-2)
    square.copy_(torch.take_along_dim(square, index, dim=-2 if side == "left" else -1))
