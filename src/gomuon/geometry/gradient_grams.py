"""Factors from the gradient itself, as in the Shampoo family. Nothing is captured."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from torch import Tensor

from gomuon.functional.factors import RootBatch, take_roots
from gomuon.functional.linalg import identity_like
from gomuon.geometry.base import Geometry, Group
from gomuon.geometry.kept_bases import Prepared as Prepared
from gomuon.geometry.kept_bases import Roots, renew_in_kept_bases
from gomuon.intervals import Rotated
from gomuon.parameters.layers import Layer
from gomuon.parameters.stacks import Stack
from gomuon.parameters.state import Count, Entries, both_sides


@dataclass(frozen=True)
class GradientGrams(Geometry):
    """L = E[GGᵀ] and R = E[GᵀG], and maps from them.

    With `refresh_every=Rotated(…)` their eigenbases are kept as well, see `kept_bases`.

    Args:
        roots: what makes maps from Grams with this number of observations, and what is done to them
            first.
        start: the name of the setting with the multiple of the identity that Grams start from;
            None: they start from zero.
        description: one line for the table of methods.
    """

    roots: Roots
    start: str | None = None
    description: str = "gradient Gram moments"

    entries: ClassVar[Entries] = {
        "observations": Count(),
        # Wide: Grams of gradients are nearly singular, and the ridges of their roots (1e-6, 1e-10)
        # are smaller than bfloat16's rounding errors.
        **both_sides("factor", numbers="semidefinite", wide=True),
        **both_sides("map"),
        **both_sides("basis", numbers="cosines"),  # with the clock `Rotated`
    }

    def refresh(
        self,
        observed: Sequence[Layer],
        renewed: Sequence[Layer],
        stacks: Sequence[Stack],
        group: Group,
    ) -> Sequence[Layer]:
        if not renewed:
            for stack in stacks:  # one by one, so that not all factors are open at a time
                self.observe(observed, [stack], group)
                stack.close()
            return ()
        failed = super().refresh(observed, renewed, stacks, group)
        for stack in stacks:
            stack.close()
        return failed

    def observe(
        self, due: Sequence[Layer], stacks: Sequence[Stack], group: Group
    ) -> Sequence[Layer]:
        if due:
            for stack in stacks:
                start = 0.0 if self.start is None else group[self.start]
                _observe_grams(stack, group["factor_decay"], start)
        return ()

    def renew(self, due: Sequence[Layer], stacks: Sequence[Stack], group: Group) -> Sequence[Layer]:
        every = group["refresh_every"]
        if due and isinstance(every, Rotated):
            return renew_in_kept_bases(stacks, self.roots, every, group)
        batches: list[RootBatch] = []
        for stack in stacks if due else ():
            observations = stack.layers[0].state.get("observations", 0)
            if observations:
                root, prepared = self.roots(observations, group)
                for side in ("left", "right"):
                    factors = stack.map(f"{side}_factor")
                    assert factors is not None
                    store = partial(store_maps, stack, f"{side}_map")
                    batches.append(RootBatch(factors, root, store, prepared))
        return take_roots(batches, group["roots"])


def store_maps(stack: Stack, name: str, batch: RootBatch) -> list[Layer]:
    """Store a map for every block of a stack; returns the layers that lack one."""
    return stack.set_maps(name, block_roots(stack, batch))


def block_roots(stack: Stack, batch: RootBatch) -> list[Tensor | None]:
    """The roots of a batch with a factor for every block of a stack."""
    roots: list[Tensor | None] = []
    for layer in stack.layers:
        for _ in range(layer.blocks):
            root, fell_back = batch.result(len(roots))
            roots.append(root)
            if fell_back:
                layer.count("root_fallbacks")
    return roots


def _observe_grams(stack: Stack, beta: float, start: float) -> None:
    """L ← βL + (1−β)GGᵀ, or a plain sum at β = 1; L is start·I at first."""
    G = stack.G
    weight = 1.0 if beta == 1 else 1 - beta
    for side, gram in (("left", G @ G.mT), ("right", G.mT @ G)):
        first = (start * identity_like(gram)).expand_as(gram)
        factor = stack.factor(f"{side}_factor", start=first)
        stack.remember(factor, factor.mul(beta).add_(gram, alpha=weight))
    for layer in stack.layers:
        layer.state["observations"] = layer.state.get("observations", 0) + 1
