"""Replicated work: statistics summed over all ranks, each of which then does everything itself.

Every rank makes the same maps from the same sums, as DDP gives every rank the same gradients. How
work is shared out instead: see `sharing`.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gomuon.agreement import first_reader
from gomuon.capture import Statistics
from gomuon.probes import Moment, working_dtype
from gomuon.ranks import Ranks

Wanted = tuple[tuple[int, ...] | None, tuple[int, ...] | None]  # shapes of the two moments


def over_ranks(
    seen: Mapping[Tensor, Statistics],
    wanted: Mapping[Tensor, Wanted],
    ranks: Ranks,
    *,
    shared: bool,
) -> dict[Tensor, Statistics]:
    """Sums of `seen` over all ranks; `wanted` names the same moments on each of them.

    A rank that saw nothing of a layer adds zeros. `shared` says that all ranks agree on who reads
    the same inputs: such layers share one sum. Where ranks disagree, each layer has its own.
    """
    parameters = list(wanted)
    owners = first_reader(seen, parameters) if shared else range(len(parameters))
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
    sums = _summed(slots, parameters[0], ranks) if slots else []
    return {
        parameter: Statistics(
            *(
                sums[places[parameter, side]] if (parameter, side) in places else None
                for side in ("inputs", "gradients")
            )
        )
        for parameter in parameters
    }


def _summed(
    slots: Sequence[tuple[Moment | None, tuple[int, ...]]],
    like: Tensor,
    ranks: Ranks,
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
    ranks.add_up(flat)
    ranks.add_up(counts)
    parts = flat.split([total.numel() for total in totals])
    return [
        Moment(part.view(total.shape), count, uses) if float(count) else None
        for part, total, (count, uses) in zip(parts, totals, counts, strict=True)
    ]
