"""State that is divided among ranks: joined for saving, divided after loading."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from gomuon.distributed.ranks import Ranks
from gomuon.parameters.groups import named
from gomuon.parameters.sharding import whole
from gomuon.parameters.state import COUNT, keep_count


def is_only_count(state: Mapping[str, Any]) -> bool:
    """Whether a trained matrix's state has only what other ranks than its owner keep."""
    return set(state) == {COUNT} and bool(state[COUNT])


def drop_others_state(
    state: Mapping[Tensor, dict[str, Any]],
    groups: Sequence[Mapping[str, Any]],
    owners: Mapping[Tensor, int],
    rank: int,
) -> list[str]:
    """Drop the state of matrices that other ranks own; returns matrices whose own is missing."""
    lacking = []
    for index, group in enumerate(groups):
        for name, parameter in named(group, index):
            entries = state.get(parameter, {})
            if owners.get(parameter, rank) != rank:
                keep_count(entries)
            elif is_only_count(entries):
                lacking.append(name)
                entries.clear()
    return lacking


def consolidated(
    state: Mapping[int, Mapping[str, Any]], owned: Iterable[int], ranks: Ranks
) -> dict[int, dict[str, Any]]:
    """All ranks' parts of a state together, on the host; all ranks must call it.

    Args:
        state: of this rank, by number of the parameter.
        owned: numbers of the matrices whose state is here and nowhere else.
        ranks: who holds the rest.
    """
    copies: dict[int, Tensor] = {}  # a map that layers share stays one

    def plain(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in copies:
            copies[id(value)] = whole(value).detach().cpu().clone()
        return copies[id(value)]

    # Sharded tensors are made whole by messages, so all ranks must meet them in one order.
    here = {
        number: {key: plain(state[number][key]) for key in sorted(state[number])}
        for number in sorted(state)
    }
    for part in ranks.objects({number: here[number] for number in owned}):
        assert isinstance(part, dict)
        here.update(part)
    return here
