"""Parameters that only one rank has, such as its experts, beside those that all ranks share.

They are left out of everything that ranks compare, send or divide among each other.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gomuon.distributed.ranks import Ranks
from gomuon.parameters.groups import is_matrix, named
from gomuon.parameters.sharding import local

Group = Mapping[str, Any]
# Of a weight and its gradient: norm and sum of each.
Numbers = tuple[float, float, float, float]

SAME_WITHIN = 1e-3  # of the norm; experts, and their gradients, differ by far more


def shared_groups(groups: Sequence[Group], own: Collection[Tensor]) -> Sequence[Group]:
    """The groups without a rank's own parameters."""
    return [_without(group, own) for group in groups]


def _without(group: Group, own: Collection[Tensor]) -> Group:
    kept = [place for place, p in enumerate(group["params"]) if p not in own]
    names = group.get("param_names")
    return {
        **group,
        "params": [group["params"][place] for place in kept],
        **({} if names is None else {"param_names": [names[place] for place in kept]}),
    }


def check_companions(groups: Sequence[Group], own: Collection[Tensor]) -> None:
    """Raise a ValueError if a group has matrices of this rank alone, and none that ranks share.

    Ranks go through the groups together, and one without a matrix in a group passes over it.
    """
    for index, group in enumerate(groups):
        present = [
            (name, p)
            for name, p in named(group, index)
            if p.grad is not None and is_matrix(group, p)
        ]
        alone = [name for name, p in present if p in own]
        if alone and len(alone) == len(present):
            raise ValueError(
                f"group {index} has matrices that only this rank has, such as {alone[0]!r}, and "
                "none with a gradient that all ranks share; put both into one group"
            )


def refuse_own(ranks: Ranks, own: Collection[Tensor]) -> None:
    """Raise a ValueError on all ranks if one of them has parameters of its own."""
    having = [rank for rank, row in enumerate(ranks.gather([bool(own)])) if row[0]]
    if having:
        raise ValueError(
            f"rank {having[0]} has parameters that no other rank has, so there is no whole state; "
            "save and load state_dict() on every rank, or use torch.distributed.checkpoint with "
            "names that differ between ranks"
        )


def numbers_of(groups: Sequence[Group], own: Collection[Tensor]) -> dict[str, Numbers]:
    """Numbers by which a rank's own parameters are told from those of other ranks."""
    return {
        name: (*_norm_and_sum(p.detach()), *_norm_and_sum(p.grad))
        for index, group in enumerate(groups)
        for name, p in named(group, index)
        if p in own and p.grad is not None and p.numel()
    }


def _norm_and_sum(tensor: Tensor) -> tuple[float, float]:
    here = local(tensor)
    wide = torch.promote_types(here.dtype, torch.float32)
    return float(torch.linalg.vector_norm(here, dtype=wide)), float(here.sum(dtype=wide))


def first_on_two_ranks(everyone: Sequence[Mapping[str, Numbers]]) -> str | None:
    """The first parameter that two ranks have with equal weights and gradients; None if none is."""
    for rank, mine in enumerate(everyone):
        for name, numbers in mine.items():
            for other in range(rank):
                if name in everyone[other] and _are_same(numbers, everyone[other][name]):
                    return (
                        f"ranks {other} and {rank} have equal weights and equal gradients of "
                        f"{name!r}, but it is taken for a parameter that only one rank has, "
                        "because the wrapper ignores it or its LayerSpec says so; if all ranks "
                        "train it, "
                        'pass specs={...: LayerSpec(ranks="shared")}. Parameters that some of the '
                        "ranks share are not supported. Nothing was changed"
                    )
    return None


def _are_same(one: Numbers, other: Numbers) -> bool:
    """Whether a weight and its gradient are equal. A gradient of zero says nothing."""
    if not all(map(math.isfinite, (*one, *other))) or not one[2]:
        return False
    norms = one[0], one[0], one[2], one[2]
    return all(
        abs(a - b) <= SAME_WITHIN * norm for a, b, norm in zip(one, other, norms, strict=True)
    )
