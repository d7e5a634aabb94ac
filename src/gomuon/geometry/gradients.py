"""Geometries made of the gradient itself; nothing is captured."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gomuon.batching import alike
from gomuon.functional import inverse_root
from gomuon.geometry.base import (
    Geometry,
    Group,
    due,
    guarded,
    guarded_roots,
    identity_like,
    keep,
    trace_mean,
)
from gomuon.layers import Layer

Roots = Callable[[Tensor, int, Group], list[Tensor | None]]


@dataclass(frozen=True)
class GradientGrams(Geometry):
    """L = E[GGᵀ] and R = E[GᵀG] on one clock, their maps on another (the Shampoo family).

    Args:
        roots: of a batch of Grams and the number of observations in them.
        description: for the table of methods.
    """

    roots: Roots
    description: str = "gradient Gram moments"

    def before(self, layers: Sequence[Layer], group: Group) -> list[Layer]:
        if due(group, "statistics_every"):
            for layer in layers:
                _observe_grams(layer, group["factor_decay"])
        failed: list[Layer] = []
        if due(group):
            for side in ("left", "right"):
                for batch in alike(layers, partial(_key, side)):
                    factors = torch.stack([layer.state[f"{side}_factor"] for layer in batch])
                    maps = self.roots(factors, batch[0].state["observations"], group)
                    for layer, new in zip(batch, maps, strict=True):
                        failed += keep(layer, f"{side}_map", new)
        return failed


def _key(side: str, layer: Layer) -> tuple[object, ...]:
    return layer.state[f"{side}_factor"].shape, layer.dtype, layer.state["observations"]


def _observe_grams(layer: Layer, beta: float) -> None:
    """L ← βL + (1−β)GGᵀ, or a plain sum at β = 1."""
    G = layer.gradients
    weight = 1.0 if beta == 1 else 1 - beta
    for side, gram in (("left", G @ G.mT), ("right", G.mT @ G)):
        factor = layer.state.get(f"{side}_factor")
        layer.state[f"{side}_factor"] = (
            weight * gram if factor is None else beta * factor + weight * gram
        )
    layer.state["observations"] = layer.state.get("observations", 0) + 1


def ridge_roots(S: Tensor, observations: int, group: Group) -> list[Tensor | None]:
    """(S + ridge·λ_max·I)^(−power)."""

    def root(S: Tensor) -> Tensor:
        largest = torch.linalg.eigvalsh(S)[..., -1, None, None]
        return inverse_root(S + group["ridge"] * largest * identity_like(S), group["power"])

    return guarded(root, S)


def trace_normalised_roots(S: Tensor, observations: int, group: Group) -> list[Tensor | None]:
    """Bias-corrected, scaled to mean eigenvalue one, + εI, to the power −α."""
    corrected = S / (1 - group["factor_decay"] ** observations)
    scale = trace_mean(corrected)
    normalised = torch.where(scale > 0, corrected / scale, identity_like(S))
    epsilon = group["epsilon"] * identity_like(S)
    return guarded_roots(normalised + epsilon, group["alpha"])


class CoupledFactors(Geometry):
    """P and Q, each whitened by the other: the coupled fixed point of FISMO, one step a time."""

    description = "coupled gradient factors"

    def before(self, layers: Sequence[Layer], group: Group) -> list[Layer]:
        failed: list[Layer] = []
        for batch in alike(layers, lambda layer: (layer.shape, layer.blocks, layer.dtype)):
            G = torch.stack([layer.gradients for layer in batch])
            m, n = G.shape[-2:]
            P = _factor_or_identity(batch, "left", G, m)
            Q = _factor_or_identity(batch, "right", G, n)
            P = _coupled(P, G @ torch.linalg.solve(Q, G.mT) / n, group)
            Q = _coupled(Q, G.mT @ torch.linalg.solve(P, G) / m, group)
            for side, factors in (("left", P), ("right", Q)):
                for layer, factor, new in zip(
                    batch, factors, guarded_roots(factors, 0.5), strict=True
                ):
                    if new is not None:
                        layer.state[f"{side}_factor"] = factor.clone()
                    failed += keep(layer, f"{side}_map", new)
        return failed


def _factor_or_identity(batch: Sequence[Layer], side: str, G: Tensor, size: int) -> Tensor:
    identity = torch.eye(size, dtype=G.dtype, device=G.device).expand(G.shape[1], size, size)
    return torch.stack([layer.state.get(f"{side}_factor", identity) for layer in batch])


def _coupled(factor: Tensor, gram: Tensor, group: Group) -> Tensor:
    """sym(d/tr(S)·S) with S = γ·factor + (1−γ)(gram + μ·tr(factor)/d·I)."""
    gamma = group["factor_decay"]
    observed = gram + group["mu"] * trace_mean(factor) * identity_like(factor)
    S = gamma * factor + (1 - gamma) * observed
    S = S / trace_mean(S)
    return (S + S.mT) / 2


class RowColumnNorms(Geometry):
    """Averages of the squared norms of G's rows and columns: a diagonal pair of maps."""

    description = "row and column norms of gradients"

    def before(self, layers: Sequence[Layer], group: Group) -> list[Layer]:
        gamma, alpha = group["factor_decay"], group["alpha"]
        for layer in layers:
            square = layer.gradients.square()
            for side, observed in (("left", square.sum(-1, True)), ("right", square.sum(-2, True))):
                factor = layer.state.get(f"{side}_factor", torch.zeros_like(observed))
                factor = gamma * factor + (1 - gamma) * observed
                largest = factor.amax(dim=(-2, -1), keepdim=True)
                layer.state[f"{side}_factor"] = factor
                floored = factor + 1e-12 * largest
                layer.state[f"{side}_scale"] = torch.where(largest > 0, floored, 1.0).pow(-alpha)
        return []
