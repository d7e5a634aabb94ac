"""Allocates all state before any training, for torch.distributed.checkpoint.

torch.distributed.checkpoint lets a new optimizer take a step with zero gradients and lr 0. It then
expects a state with the keys and shapes of a trained one. So such a step runs once on identity
moments to allocate all state, then zeroes the state. The result is a *blank* state: no step is
counted, and it is neither trained on nor loaded.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gomuon.moments import Statistics
from gomuon.parameters.stacks import Participants
from gomuon.parameters.state import COUNT, is_blank
from gomuon.recipes.stations import NextIntervals
from gomuon.step import Step

State = dict[Tensor, dict[str, Any]]


def drop_blank(state: State) -> None:
    """Drop states that were only allocated, not trained."""
    for parameter, entries in list(state.items()):
        if is_blank(entries):
            del state[parameter]


def allocate(
    step: Step,
    groups: Sequence[dict[str, Any]],
    participants: Sequence[Participants],
    statistics: Callable[[int, Tensor], Statistics],
    state: Mapping[Tensor, dict[str, Any]],
) -> None:
    """Run one step on identity moments to allocate all state, then zero it.

    Args:
        step: the optimizer's step.
        groups: the optimizer's parameter groups.
        participants: the layers and parameters to update, by group.
        statistics: returns the identity moments of a parameter, given its group's index.
        state: the optimizer's state.
    """
    recipe = step.recipe
    for index, (group, present) in enumerate(zip(groups, participants, strict=True)):
        group["step"] = 0
        for layer in present.layers:
            layer.statistics = statistics(index, layer.parameter)
            layer.phase = 0.0  # refresh all layers now, even if they are staggered
        recipe.geometry.refresh(present.layers, present.layers, present.stacks, group)
        for stack, _, D in step.directions(present.stacks, group):
            recipe.scale(D, stack, group)
        recipe.geometry.after(present.layers, present.stacks, group)
        for stack in present.stacks:
            stack.close()
        for matrix in present.matrices:
            matrix.state.setdefault(COUNT, 0)
        NextIntervals(recipe.clock, group, present, step.layout).settle()
    for entries in state.values():
        for key, value in entries.items():
            entries[key] = torch.zeros_like(value) if isinstance(value, Tensor) else 0
