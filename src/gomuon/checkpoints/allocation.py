"""Allocating all state before any training, for torch.distributed.checkpoint.

torch.distributed.checkpoint makes a new optimizer take a step with zero gradients and lr 0, and
then expects its state to have the keys and shapes of one that has trained. So such a step runs
once on identity moments to allocate all state, then zeroes it. The result is a *blank* state: no
step is counted, and it is never trained on nor loaded.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gomuon.moments import Statistics
from gomuon.parameters.stacks import Participants
from gomuon.parameters.state import COUNT, is_blank
from gomuon.step import Step

State = dict[Tensor, dict[str, Any]]


def drop_blank(state: State) -> None:
    """Drop states that were only allocated."""
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
        step: the optimizer's.
        groups: its parameter groups.
        participants: who takes part, by group.
        statistics: the identity moments of a group's parameter.
        state: the optimizer's.
    """
    recipe = step.recipe
    for index, (group, present) in enumerate(zip(groups, participants, strict=True)):
        group["step"] = 0
        for layer in present.layers:
            layer.statistics = statistics(index, layer.parameter)
            layer.phase = 0.0  # all at once, staggered or not
        recipe.geometry.observe(present.layers, present.stacks, group)
        recipe.geometry.renew(present.layers, present.stacks, group)
        for stack, _, D in step.directions(present.stacks, group):
            recipe.scale(D, stack, group)
        recipe.geometry.after(present.layers, present.stacks, group)
        for matrix in present.matrices:
            matrix.state.setdefault(COUNT, 0)
    for entries in state.values():
        for key, value in entries.items():
            entries[key] = torch.zeros_like(value) if isinstance(value, Tensor) else 0
