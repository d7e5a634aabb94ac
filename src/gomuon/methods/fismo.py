"""FISMO: matched map-back at half power in coupled gradient factors."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from gomuon.functional.factors import guarded_roots
from gomuon.functional.linalg import identity_like, trace_mean
from gomuon.functional.oracle import preconditioned
from gomuon.functional.polar_factor import polar
from gomuon.geometry.base import Geometry
from gomuon.optimizer import MatrixOptimizer
from gomuon.parameters.stacks import Layer, Stack
from gomuon.parameters.state import Entries, both_sides
from gomuon.recipes.recipe import Recipe
from gomuon.recipes.registry import register
from gomuon.recipes.stations import MUON, Group, lerp, muon_scale, rate
from gomuon.recipes.work import (
    Decomposition,
    Matrices,
    Product,
    StepWork,
    Work,
    both_roots_work,
    maps_work,
    momentum_factors_and_maps,
    plain_polar_work,
)
from gomuon.settings import NOT_NEGATIVE, SHARE, Setting, with_defaults


class CoupledFactors(Geometry):
    """P and Q, each whitened by the other: one step per update to FISMO's coupled fixed point."""

    description = "coupled gradient factors"
    entries: ClassVar[Entries] = {
        **both_sides("factor", numbers="definite"),
        **both_sides("map"),
    }

    def observe(
        self, due: Sequence[Layer], stacks: Sequence[Stack], group: Group
    ) -> Sequence[Layer]:
        failed: list[Layer] = []
        for stack in stacks:
            G = stack.G
            m, n = G.shape[-2:]
            kept_P = stack.factor("left_factor", start=_identities(G, m))
            kept_Q = stack.factor("right_factor", start=_identities(G, n))
            P = stack.usable(_coupled(kept_P, G @ _solved(kept_Q, G.mT) / n, group), kept_P)
            Q = stack.usable(_coupled(kept_Q, G.mT @ _solved(P, G) / m, group), kept_Q)
            # Factor and map are renewed together: without a root the new factor is dropped too.
            for side, kept, factors in (("left", kept_P, P), ("right", kept_Q, Q)):
                maps = guarded_roots(factors, 0.5)
                usable = torch.tensor([new is not None for new in maps], device=G.device)
                kept.copy_(torch.where(usable[:, None, None], factors, kept))
                failed += stack.set_maps(f"{side}_map", maps)
        return failed


def _solved(S: Tensor, X: Tensor) -> Tensor:
    """S⁻¹X. For a singular S the result is not finite; no exception stops the whole batch."""
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


def whitened_momentum(stack: Stack, group: Group) -> Tensor:
    """M ← βM + (1−β)·P_B G P_A: momentum in whitened coordinates."""
    G = preconditioned(stack.G, stack.map("left_map"), stack.map("right_map"))
    return lerp(stack.usable(G, 0.0), stack, group)


def mapped_polar(X: Tensor, stack: Stack, group: Group) -> Tensor:
    """D = P_B·polar(X)·P_A; X is already in whitened coordinates."""
    left, right = stack.map("left_map"), stack.map("right_map")
    return preconditioned(polar(X, group["polar"]), left, right)


def _step_work(x: Matrices, group: Group) -> Work:
    """Both maps on the gradient and on the polar factor."""
    return 2 * maps_work(x, True, True) + plain_polar_work(x, group)


def _coupled_work(x: Matrices, group: Group) -> Work:
    """G Q⁻¹Gᵀ and Gᵀ P⁻¹G."""
    return [
        Decomposition(x.count, "solve", x.n, x.m),
        Product(x.count, x.m, x.n, x.m),
        Decomposition(x.count, "solve", x.m, x.n),
        Product(x.count, x.n, x.m, x.n),
    ]


RECIPE = Recipe(
    "FISMO",
    geometry=CoupledFactors(),
    source=whitened_momentum,
    direction=mapped_polar,
    scale=muon_scale,
    settings={
        **rate(0.02),
        **with_defaults(MUON, nesterov=False),
        "factor_decay": Setting(0.95, SHARE),
        "mu": Setting(1e-3, NOT_NEGATIVE),
    },
    formula="D = P^−½·polar(M)·Q^−½, M the momentum of P^−½ G Q^−½",
    origin="arXiv 2601.21750, from a digest: no code is public, and its numbers are ours",
    work=StepWork(
        _step_work,
        observe=_coupled_work,
        renew=both_roots_work,
        keeps=momentum_factors_and_maps,
    ),
)


@register
class FISMO(MatrixOptimizer):
    """FISMO: matched half-power map-back in coupled gradient factors.

    Written from a digest of the paper; no code is public, and the defaults are ours.
    """

    recipe = RECIPE
