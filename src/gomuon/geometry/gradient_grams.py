"""Factors from the gradient itself, as in the Shampoo family. Nothing is captured."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gomuon.functional.root_batches import RootBatch
from gomuon.geometry.base import Geometry, Group
from gomuon.geometry.root_jobs import StackJob, run_jobs
from gomuon.parameters.stacks import Layer, Stack
from gomuon.parameters.state import Count, Entries, both_sides

Roots = Callable[[Tensor, int, Group], RootBatch]


@dataclass(frozen=True)
class GradientGrams(Geometry):
    """L = E[GGᵀ] and R = E[GᵀG], and maps from them.

    Args:
        roots: what makes maps from a batch of Grams, given their number of observations.
        description: one line for the table of methods.
    """

    roots: Roots
    description: str = "gradient Gram moments"

    entries: ClassVar[Entries] = {
        "observations": Count(),
        **both_sides("factor", numbers="semidefinite"),
        **both_sides("map"),
    }

    def observe(
        self, due: Sequence[Layer], stacks: Sequence[Stack], group: Group
    ) -> Sequence[Layer]:
        if due:
            for stack in stacks:
                _observe_grams(stack, group["factor_decay"])
        return ()

    def renew(self, due: Sequence[Layer], stacks: Sequence[Stack], group: Group) -> Sequence[Layer]:
        jobs: list[StackJob] = []
        for stack in stacks if due else ():
            observations = stack.layers[0].state.get("observations", 0)
            if observations:
                for side in ("left", "right"):
                    factors = stack.map(f"{side}_factor")
                    assert factors is not None
                    batch = self.roots(factors, observations, group)
                    jobs.append(StackJob(batch, stack, f"{side}_map"))
        return run_jobs(jobs, group["roots"])


def _observe_grams(stack: Stack, beta: float) -> None:
    """L ← βL + (1−β)GGᵀ, or a plain sum at β = 1."""
    G = stack.G
    weight = 1.0 if beta == 1 else 1 - beta
    for side, gram in (("left", G @ G.mT), ("right", G.mT @ G)):
        factor = stack.factor(f"{side}_factor", start=torch.zeros_like(gram))
        stack.remember(factor, factor.mul(beta).add_(gram, alpha=weight))
    for layer in stack.layers:
        layer.state["observations"] = layer.state.get("observations", 0) + 1
