"""Replicated work: captured sums are added up over all ranks, then each rank computes everything.

All ranks have the same sums, and the same gradients from DDP, so they compute the same steps.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor

from gomuon.distributed.agreement import Agreement
from gomuon.distributed.ranks import WEIGHTS_MAY_DIFFER, Ranks
from gomuon.distributed.sums import slots_of, statistics_of, sum_everywhere
from gomuon.distributed.team import Alone, Captured, Group, LocalCheck, Numbers
from gomuon.errors import RankError
from gomuon.moments import MomentShapes, Statistics
from gomuon.parameters.layers import Layer, note_layers_on_error
from gomuon.parameters.stacks import Participants


class Replicated(Alone):
    """Ranks that each compute everything, as one alone does; only captured sums are sent."""

    def __init__(self, ranks: Ranks, own: Collection[Tensor] = ()) -> None:
        self.ranks = ranks
        self._own = own  # parameters that only this rank has
        self.size = self.averaged = ranks.size
        self.rank = ranks.rank
        self.waits_for_others = ranks.size > 1
        self.agreement = Agreement(ranks, own)

    def agree(
        self, check: LocalCheck, method: str, groups: Sequence[Group]
    ) -> tuple[str | None, Captured]:
        def both() -> tuple[str | None, Captured]:
            _check_sums_dtype(groups)
            return check()

        return self.agreement.before_step(both, method, groups)

    def compare_again(self) -> None:
        self.agreement.compared = False

    def sum_statistics(
        self,
        matrices: Sequence[Any],
        seen: Mapping[Tensor, Statistics],
        wanted: Mapping[Tensor, MomentShapes],
    ) -> Mapping[Tensor, Statistics]:
        shared = dict.fromkeys(p for p in wanted if p not in self._own)
        slots = slots_of(shared, seen, wanted, inputs_agree=self.agreement.inputs_agree)
        summed = statistics_of(slots, sum_everywhere(slots, self.ranks))
        return {**summed, **{p: seen[p] for p in self._own if p in seen}}

    def fail_together(
        self, participants: Participants, numbers: Numbers
    ) -> AbstractContextManager[None]:
        layers = participants.layers
        return fail_together(self.ranks, layers, numbers, consequence=WEIGHTS_MAY_DIFFER)

    def any(self, here: bool) -> bool:
        return any_rank(self.ranks, here)


def _check_sums_dtype(groups: Sequence[Group]) -> None:
    narrow = next((group["sums_dtype"] for group in groups if group.get("sums_dtype")), None)
    if narrow is not None:
        raise ValueError(
            f'sums_dtype={narrow!r} needs owners, which add up what ranks send; use work="shared", '
            'or sums_dtype=None with work="replicated"'
        )


@contextmanager
def fail_together(
    ranks: Ranks, layers: Sequence[Layer], numbers: Numbers, *, consequence: str
) -> Iterator[None]:
    """At the end of this context all ranks raise if one of them failed.

    Args:
        ranks: the ranks that work together.
        layers: the layers this rank computes, for the note on an exception.
        numbers: sent along; at the end each is the least over the ranks.
        consequence: what a failure means for the weights, for the message on the other ranks.
    """
    failure: Exception | None = None
    try:
        with note_layers_on_error(layers):
            yield
    except RankError:
        raise
    except Exception as raised:
        failure = raised
    tell_least(ranks, numbers, failure, consequence=consequence)


def tell_least(
    ranks: Ranks, numbers: Numbers, failure: Exception | None = None, *, consequence: str
) -> None:
    """All ranks raise if one of them failed; otherwise each number is the least over the ranks."""
    table = ranks.exchange_status(failure, *numbers.values(), consequence=consequence)
    numbers.update(zip(numbers, map(min, zip(*table, strict=True)), strict=True))


def any_rank(ranks: Ranks, here: bool) -> bool:
    """Whether something is true on any rank."""
    return any(there for (there,) in ranks.exchange_status(None, float(here)))
