"""FISMO: matched map-back at half power in coupled gradient factors."""

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from gomuon.functional.factors import (
    Root,
    RootBatch,
    read_roots,
    start_roots,
    store_roots,
    takes_products,
)
from gomuon.functional.linalg import identity_like, trace_mean
from gomuon.functional.oracle import preconditioned
from gomuon.functional.polar_factor import polar
from gomuon.geometry.base import Geometry
from gomuon.geometry.gradient_grams import block_roots
from gomuon.optimizer import MatrixOptimizer
from gomuon.parameters.layers import Layer
from gomuon.parameters.stacks import Stack
from gomuon.parameters.state import Entries, both_sides
from gomuon.recipes.recipe import Recipe
from gomuon.recipes.registry import register
from gomuon.recipes.stations import (
    MUON,
    ROOTS,
    Group,
    lerp,
    measured_rms_scale,
    muon_scale,
    rate,
)
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
        batches: list[RootBatch] = []
        for stack in stacks:
            products = takes_products(group["roots"], stack.G.device)
            batches += (_multiplied if products else _solved)(stack, group)
        read_roots(batches)
        return store_roots(batches)


def _batch(stack: Stack, side: str, factors: Tensor, kept: Tensor) -> RootBatch:
    """New factors of one side of a stack, whose roots are wanted."""
    return RootBatch(factors, Root.of(0.5), partial(_store, stack, side, factors, kept))


def _store(stack: Stack, side: str, factors: Tensor, kept: Tensor, batch: RootBatch) -> list[Layer]:
    """Factor and map are renewed together: without a root the new factor is dropped too."""
    maps = block_roots(stack, batch)
    renewed = [index for index, new in enumerate(maps) if new is not None]
    if len(renewed) == len(maps):
        kept.copy_(factors)
    else:  # a failure is rare: block by block
        for index in renewed:
            kept[index].copy_(factors[index])
    return stack.set_maps(f"{side}_map", maps)


def _solved(stack: Stack, group: Group) -> list[RootBatch]:
    """New P from G Q⁻¹Gᵀ and Q from Gᵀ P⁻¹G, by solving equations."""
    G = stack.G
    m, n = G.shape[-2:]
    kept_P, kept_Q = _kept_factors(stack)
    # For a singular factor the solution is not finite; no exception stops the whole batch.
    gram = G @ torch.linalg.solve_ex(kept_Q, G.mT)[0]
    P = stack.usable(_coupled(kept_P, gram / n, group), kept_P)
    gram = G.mT @ torch.linalg.solve_ex(P, G)[0]
    Q = stack.usable(_coupled(kept_Q, gram / m, group), kept_Q)
    return [_batch(stack, "left", P, kept_P), _batch(stack, "right", Q, kept_Q)]


def _multiplied(stack: Stack, group: Group) -> list[RootBatch]:
    """The same by products: P⁻¹ and Q⁻¹ are the squares of the maps."""
    G = stack.G
    m, n = G.shape[-2:]
    kept_P, kept_Q = _kept_factors(stack)
    left, right = stack.map("left_map"), stack.map("right_map")
    left, right = _or_identities(left, G, m), _or_identities(right, G, n)
    gram = G @ (right @ (right @ G.mT))
    P = stack.usable(_coupled(kept_P, gram / n, group), kept_P)
    of_P = _batch(stack, "left", P, kept_P)
    start_roots([of_P], "products")
    left = of_P.roots_or(left)
    gram = G.mT @ (left @ (left @ G))
    Q = stack.usable(_coupled(kept_Q, gram / m, group), kept_Q)
    of_Q = _batch(stack, "right", Q, kept_Q)
    start_roots([of_Q], "products")
    return [of_P, of_Q]


def _kept_factors(stack: Stack) -> tuple[Tensor, Tensor]:
    G = stack.G
    m, n = G.shape[-2:]
    P = stack.factor("left_factor", start=_identities(G, m))
    return P, stack.factor("right_factor", start=_identities(G, n))


def _or_identities(maps: Tensor | None, G: Tensor, size: int) -> Tensor:
    return _identities(G, size) if maps is None else maps


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
    grams: Work = [Product(x.count, x.m, x.n, x.m), Product(x.count, x.n, x.m, x.n)]
    if group["roots"] == "products":
        return [*grams, *(2 * maps_work(x, True, True))]
    solved = [Decomposition(x.count, "solve", *sides) for sides in ((x.n, x.m), (x.m, x.n))]
    return [*grams, *solved]


def _root_work(x: Matrices, group: Group) -> Work:
    return both_roots_work(x, group, 0.5)


RECIPE = Recipe(
    "FISMO",
    geometry=CoupledFactors(),
    source=whitened_momentum,
    direction=mapped_polar,
    scale=muon_scale,
    rms_scale=measured_rms_scale,
    settings={
        **rate(0.02),
        **with_defaults(MUON, nesterov=False),
        **ROOTS,
        "factor_decay": Setting(0.95, SHARE),
        "mu": Setting(1e-3, NOT_NEGATIVE),
    },
    formula="D = P^−½·polar(M)·Q^−½, M the momentum of P^−½ G Q^−½",
    origin="arXiv 2601.21750, from a digest: no code is public, and its numbers are ours",
    work=StepWork(
        _step_work,
        observe=_coupled_work,
        renew=_root_work,
        keeps=momentum_factors_and_maps,
    ),
)


@register
class FISMO(MatrixOptimizer):
    """FISMO: matched half-power map-back in coupled gradient factors.

    Written from a digest of the paper; no code is public, and the defaults are ours.
    """

    recipe = RECIPE
