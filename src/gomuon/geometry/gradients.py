"""Geometries made of the gradient itself; nothing is captured."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gomuon.functional.linalg import decompose, widened
from gomuon.functional.products import symmetric_product
from gomuon.geometry.base import (
    Geometry,
    Group,
    due,
    guarded,
    guarded_roots,
    identity_like,
    renewed,
    trace_mean,
)
from gomuon.layers import Layer
from gomuon.stacks import Stack

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

    def before(self, stacks: Sequence[Stack], group: Group) -> list[Layer]:
        failed: list[Layer] = []
        for stack in stacks:
            if due(group, "statistics_every"):
                _observe_grams(stack, group["factor_decay"])
            observations = stack.layers[0].state.get("observations", 0)
            if due(group) and observations:
                for side in ("left", "right"):
                    factors = stack.map(f"{side}_factor")
                    assert factors is not None
                    maps = self.roots(factors, observations, group)
                    failed += renewed(stack, f"{side}_map", maps)
        return failed


def _observe_grams(stack: Stack, beta: float) -> None:
    """L ← βL + (1−β)GGᵀ, or a plain sum at β = 1."""
    G = stack.G
    weight = 1.0 if beta == 1 else 1 - beta
    for side, gram in (("left", G @ G.mT), ("right", G.mT @ G)):
        factor = stack.factor(f"{side}_factor", start=torch.zeros_like(gram))
        stack.remember(factor, factor.mul(beta).add_(gram, alpha=weight))
    for layer in stack.layers:
        layer.state["observations"] = layer.state.get("observations", 0) + 1


def ridge_roots(S: Tensor, observations: int, group: Group) -> list[Tensor | None]:
    """(S + ridge·λ_max·I)^(−power)."""

    def root(S: Tensor) -> Tensor:
        # In float64, for a ridge of 1e-6 is as small as float32's own errors.
        values, V = decompose(torch.linalg.eigh, widened(S))
        largest = values[..., -1:]
        ridged = torch.where(largest > 0, values.clamp_min(0) + group["ridge"] * largest, 1.0)
        return _inverse_power(ridged, V, group["power"]).to(S.dtype)

    return guarded(root, S)


def trace_normalised_roots(S: Tensor, observations: int, group: Group) -> list[Tensor | None]:
    """Bias-corrected, scaled to mean eigenvalue one, + εI, eigenvalues lifted to ≥ ε; then ^−α."""
    corrected = S / (1 - group["factor_decay"] ** observations)
    scale = trace_mean(corrected)
    normalised = torch.where(scale > 0, corrected / scale, identity_like(S))

    def root(S: Tensor) -> Tensor:
        values, V = decompose(torch.linalg.eigh, S)
        shift = (-values[..., :1]).clamp_min(0) + group["epsilon"]
        return _inverse_power(values + shift, V, group["alpha"])

    return guarded(root, normalised + group["epsilon"] * identity_like(S))


def _inverse_power(values: Tensor, V: Tensor, power: float) -> Tensor:
    """V diag(values^−power) Vᵀ, symmetric up to the order of its sums."""
    half = V * values.pow(-power / 2).unsqueeze(-2)
    return symmetric_product(half.mT)


class CoupledFactors(Geometry):
    """P and Q, each whitened by the other: the coupled fixed point of FISMO, one step a time."""

    description = "coupled gradient factors"

    def before(self, stacks: Sequence[Stack], group: Group) -> list[Layer]:
        failed: list[Layer] = []
        for stack in stacks:
            G = stack.G
            m, n = G.shape[-2:]
            kept_P = stack.factor("left_factor", start=_identities(G, m))
            kept_Q = stack.factor("right_factor", start=_identities(G, n))
            P = stack.usable(_coupled(kept_P, G @ _solved(kept_Q, G.mT) / n, group), kept_P)
            Q = stack.usable(_coupled(kept_Q, G.mT @ _solved(P, G) / m, group), kept_Q)
            for side, kept, factors in (("left", kept_P, P), ("right", kept_Q, Q)):
                maps = guarded_roots(factors, 0.5)
                usable = torch.tensor([new is not None for new in maps], device=G.device)
                kept.copy_(torch.where(usable[:, None, None], factors, kept))
                failed += renewed(stack, f"{side}_map", maps)
        return failed


def _solved(S: Tensor, X: Tensor) -> Tensor:
    """S⁻¹X; not finite where S is singular, which costs one matrix and no exception."""
    return torch.linalg.solve_ex(S, X)[0]


def _identities(G: Tensor, size: int) -> Tensor:
    return torch.eye(size, dtype=G.dtype, device=G.device).expand(len(G), size, size)


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

    def before(self, stacks: Sequence[Stack], group: Group) -> list[Layer]:
        gamma, alpha = group["factor_decay"], group["alpha"]
        for stack in stacks:
            square = stack.G.square()
            for side, observed in (("left", square.sum(-1, True)), ("right", square.sum(-2, True))):
                factor = stack.factor(f"{side}_factor", start=torch.zeros_like(observed))
                stack.remember(factor, factor.lerp(observed, 1 - gamma))
                largest = factor.amax(dim=(-2, -1), keepdim=True)
                floored = factor + 1e-12 * largest
                scale = torch.where(largest > 0, floored, 1.0).pow(-alpha)
                stack.set(f"{side}_scale", scale)
        return []
