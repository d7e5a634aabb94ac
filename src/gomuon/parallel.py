"""Replicated work: statistics summed over all ranks, each of which then does everything itself.

Every rank makes the same maps from the same sums, as DDP gives every rank the same gradients. How
work is shared out instead: see `sharing`.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from gomuon.capture import Statistics
from gomuon.probes import Moment, working_dtype

Wanted = tuple[tuple[int, ...] | None, tuple[int, ...] | None]  # shapes of the two moments


def over_ranks(
    seen: Mapping[Tensor, Statistics],
    wanted: Mapping[Tensor, Wanted],
    group: dist.ProcessGroup | None = None,
) -> dict[Tensor, Statistics]:
    """Sums of `seen` over all ranks; `wanted` names the same moments on each of them.

    A rank that saw nothing of a layer adds zeros. Layers that share their inputs on every rank
    share one sum; where ranks disagree, each layer has its own.
    """
    parameters = list(wanted)
    owners = _shared_on_every_rank(parameters, seen, group)
    slots: list[tuple[Moment | None, tuple[int, ...]]] = []
    places: dict[tuple[Tensor, str], int] = {}
    for index, parameter in enumerate(parameters):
        local = seen.get(parameter, Statistics(None, None))
        for side, shape in zip(("inputs", "gradients"), wanted[parameter], strict=True):
            if shape is None:
                continue
            owner = parameters[owners[index]] if side == "inputs" else parameter
            if owner is not parameter:
                places[parameter, side] = places[owner, side]
                continue
            places[parameter, side] = len(slots)
            slots.append((getattr(local, side), shape))
    sums = _summed(slots, parameters[0], group) if slots else []
    return {
        parameter: Statistics(
            *(
                sums[places[parameter, side]] if (parameter, side) in places else None
                for side in ("inputs", "gradients")
            )
        )
        for parameter in parameters
    }


def _shared_on_every_rank(
    parameters: Sequence[Tensor],
    seen: Mapping[Tensor, Statistics],
    group: dist.ProcessGroup | None,
) -> list[int]:
    """For every parameter the first one with the same inputs, if all ranks agree; else itself."""
    first: dict[int, int] = {}
    mine = []
    for index, parameter in enumerate(parameters):
        inputs = seen[parameter].inputs if parameter in seen else None
        mine.append(index if inputs is None else first.setdefault(id(inputs), index))
    device = parameters[0].device
    low, high = torch.tensor(mine, device=device), torch.tensor(mine, device=device)
    dist.all_reduce(low, dist.ReduceOp.MIN, group)
    dist.all_reduce(high, dist.ReduceOp.MAX, group)
    return mine if torch.equal(low, high) else list(range(len(parameters)))


def _summed(
    slots: Sequence[tuple[Moment | None, tuple[int, ...]]],
    like: Tensor,
    group: dist.ProcessGroup | None,
) -> list[Moment | None]:
    """All moments in two messages: totals in one, counts in the other."""
    zeros = [
        torch.zeros(shape, dtype=working_dtype(like), device=like.device) for _, shape in slots
    ]
    totals = [
        zero if local is None else local.total.to(zero)
        for zero, (local, _) in zip(zeros, slots, strict=True)
    ]
    flat = torch.cat([total.flatten() for total in totals])
    none = torch.zeros((), dtype=torch.float64, device=like.device)
    counts = torch.stack(
        [
            torch.stack((none, none) if local is None else (local.count, local.uses))
            for local, _ in slots
        ]
    )
    dist.all_reduce(flat, group=group)
    dist.all_reduce(counts, group=group)
    parts = flat.split([total.numel() for total in totals])
    return [
        Moment(part.view(total.shape), count, uses) if float(count) else None
        for part, total, (count, uses) in zip(parts, totals, counts, strict=True)
    ]
