"""Replicated work: captured sums are added up over all ranks, then each rank computes everything.

All ranks make the same maps from the same sums, as DDP gives them the same gradients.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor

from gomuon.distributed.agreement import Agreement
from gomuon.distributed.moments import slots_of, statistics_of, sum_everywhere
from gomuon.distributed.ranks import MOVED, Ranks
from gomuon.distributed.team import Alone, Captured, Group, Look
from gomuon.errors import RankError
from gomuon.moments import MomentShapes, Statistics
from gomuon.parameters.stacks import Layer, Participants, naming


class Replicated(Alone):
    """Ranks that each compute everything, as one alone does; only captured sums are sent."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.size = ranks.size
        self.rank = ranks.rank
        self.agreement = Agreement(ranks)

    def agree(
        self, look: Look, method: str, groups: Sequence[Group]
    ) -> tuple[str | None, Captured]:
        return self.agreement.reach(look, method, groups)

    def compare_again(self) -> None:
        self.agreement.compared = False

    def sum_statistics(
        self,
        matrices: Sequence[Any],
        seen: Mapping[Tensor, Statistics],
        wanted: Mapping[Tensor, MomentShapes],
    ) -> Mapping[Tensor, Statistics]:
        slots = slots_of(
            dict.fromkeys(wanted), seen, wanted, inputs_agree=self.agreement.inputs_agree
        )
        return statistics_of(slots, sum_everywhere(slots, self.ranks))

    def together(self, participants: Participants) -> AbstractContextManager[None]:
        return working_together(self.ranks, participants.layers, left=MOVED)

    def any(self, here: bool) -> bool:
        return any_rank(self.ranks, here)


@contextmanager
def working_together(ranks: Ranks, layers: Sequence[Layer], *, left: str) -> Iterator[None]:
    """Work at whose end all ranks know whether all succeeded.

    Args:
        ranks: who works.
        layers: what this rank works on, for the note on an exception.
        left: what a failure leaves behind, for the message to the other ranks.
    """
    failure: Exception | None = None
    try:
        with naming(layers):
            yield
    except RankError:
        raise
    except Exception as raised:
        failure = raised
    ranks.agree(failure, left=left)


def any_rank(ranks: Ranks, here: bool) -> bool:
    """Whether something is true on any rank."""
    return any(there for (there,) in ranks.agree(None, float(here)))
