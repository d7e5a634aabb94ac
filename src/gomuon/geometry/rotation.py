"""SOAP's slowly rotating eigenbasis of the gradient Grams."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gomuon.functional.linalg import decompose
from gomuon.geometry.base import Geometry, Group, due
from gomuon.layers import Layer


class RotatingBasis(Geometry):
    """Q_L, Q_R: eigenvectors at first, then one power step and QR every `refresh_every` steps.

    Everything happens after the update, with the gradient the update was made of.
    """

    description = "gradient Gram moments and their eigenbasis"

    def after(self, layers: Sequence[Layer], group: Group) -> None:
        beta = group["factor_decay"]
        for layer in layers:
            G = layer.gradients
            for side, gram in (("left", G @ G.mT), ("right", G.mT @ G)):
                if gram.shape[-1] > group["max_side"]:
                    continue
                factor = layer.state.get(f"{side}_factor", torch.zeros_like(gram))
                layer.state[f"{side}_factor"] = factor = beta * factor + (1 - beta) * gram
                basis = layer.state.get(f"{side}_basis")
                if basis is None:
                    _, vectors = decompose(torch.linalg.eigh, factor)
                    layer.state[f"{side}_basis"] = vectors.flip(-1)
                elif due(group):
                    layer.state[f"{side}_basis"] = _rotated(layer, side, factor, basis)


def _rotated(layer: Layer, side: str, factor: Tensor, basis: Tensor) -> Tensor:
    """One power step; the second moment follows its directions as they change places."""
    estimate = (basis * (factor @ basis)).sum(-2)  # diag(QᵀLQ)
    order = estimate.argsort(dim=-1, descending=True)
    square = layer.recall("square")
    index = order.unsqueeze(-1) if side == "left" else order.unsqueeze(-2)
    layer.remember("square", torch.take_along_dim(square, index, dim=-2 if side == "left" else -1))
    basis = torch.take_along_dim(basis, order.unsqueeze(-2), dim=-1)
    return torch.linalg.qr(factor @ basis).Q
