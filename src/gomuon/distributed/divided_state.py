"""State that is divided among ranks: collected for saving, divided after loading."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gomuon.distributed.ranks import Ranks
from gomuon.parameters.groups import named
from gomuon.parameters.sharding import full_tensor
from gomuon.parameters.state import COUNT, EVERYWHERE, keep_only_count


@dataclass(frozen=True)
class GatheredState:
    """The whole state, gathered for saving; None if another rank has it."""

    entries: dict[int, dict[str, Any]] | None


def is_only_count(state: Mapping[str, Any]) -> bool:
    """Whether a state has only what ranks keep for matrices of other owners."""
    return set(state) <= set(EVERYWHERE) and bool(state.get(COUNT))


def drop_others_state(
    state: Mapping[Tensor, dict[str, Any]],
    groups: Sequence[Mapping[str, Any]],
    owners: Mapping[Tensor, int],
    rank: int,
) -> list[str]:
    """Drop the state of matrices that other ranks own.

    Returns the names of this rank's matrices whose state is missing.
    """
    lacking = []
    for index, group in enumerate(groups):
        for name, parameter in named(group, index):
            entries = state.get(parameter, {})
            if owners.get(parameter, rank) != rank:
                keep_only_count(entries)
            elif is_only_count(entries):
                lacking.append(name)
                entries.clear()
    return lacking


def consolidated(
    state: Mapping[int, Mapping[str, Any]],
    owned: Iterable[int],
    ranks: Ranks,
    to: int | None = None,
) -> dict[int, dict[str, Any]]:
    """The state of all ranks, on the CPU. All ranks must call it.

    Args:
        state: this rank's state, by parameter number.
        owned: numbers of the matrices that this rank owns.
        ranks: the ranks that share the state.
        to: the rank that gets the whole state; None is all ranks.
    """
    copies: dict[int, Tensor] = {}  # a map that layers share stays shared

    def on_host(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in copies:
            copies[id(value)] = full_tensor(value).detach().cpu().clone()
        return copies[id(value)]

    # Messages make sharded tensors whole, so all ranks must go through them in the same order.
    here = {
        number: {key: on_host(state[number][key]) for key in sorted(state[number])}
        for number in sorted(state)
    }
    mine = {number: here[number] for number in owned}
    for part in ranks.gather_objects(mine) if to is None else ranks.gather_objects_on(to, mine):
        assert isinstance(part, dict)
        here.update(part)
    return here
