"""Tensor parallelism by blocks: each rank's part of a divided layer is a matrix of its own.

The ranks that divide a layer send each other no sums and no steps: their blocks are different
matrices, and what they have in common they compute alike. They only agree before a step, and fail
together. The ranks that have the *same* blocks (data parallelism) are a team of their own, and this
team does all the work.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from gomuon.capture.model import ModelCapture
from gomuon.distributed.agreement import Agreement
from gomuon.distributed.ranks import WEIGHTS_MAY_DIFFER, Ranks
from gomuon.distributed.replicated import tell_least
from gomuon.distributed.team import Captured, ChooseOwners, Group, LocalCheck, Numbers, Team
from gomuon.moments import MomentShapes, Statistics
from gomuon.parameters.layers import Layer
from gomuon.parameters.layout import MatrixParameter
from gomuon.parameters.sharding import local
from gomuon.parameters.stacks import Participants
from gomuon.parameters.tensor_shards import add_up_gradients


class Blocks:
    """A team of ranks with the same blocks, beside teams with the other blocks of the layers.

    Args:
        same: the ranks that have this rank's blocks.
        ranks: the ranks that divide the layers.
        own: parameters that only this rank has.
    """

    waits_for_others = True

    def __init__(self, same: Team, ranks: Ranks, own: Collection[Tensor] = ()) -> None:
        self.same = same
        self.ranks = ranks
        self.size = same.size
        self.averaged = same.averaged
        self.rank = same.rank
        self.agreement = Agreement(ranks, own)
        self._raised_together = False

    def agree(
        self, check: LocalCheck, method: str, groups: Sequence[Group]
    ) -> tuple[str | None, Captured]:
        add_up_gradients(groups)
        of_same = partial(self.same.agree, check, method, groups)
        fault, captured = self.agreement.before_step(of_same, method, groups)
        if fault is not None:
            self.same.forget()
        return fault, captured

    def compare_again(self) -> None:
        self.agreement.compared = False
        self.same.compare_again()

    def layers(
        self, matrices: Sequence[MatrixParameter], choose: ChooseOwners
    ) -> tuple[list[Layer], Sequence[Any]]:
        return self.same.layers(matrices, choose)

    def gather(self, matrices: Sequence[Any], *, weights: bool) -> Callable[[], None]:
        return self.same.gather(matrices, weights=weights)

    def sum_statistics(
        self,
        matrices: Sequence[Any],
        seen: Mapping[Tensor, Statistics],
        wanted: Mapping[Tensor, MomentShapes],
    ) -> Mapping[Tensor, Statistics]:
        return self.same.sum_statistics(matrices, seen, wanted)

    def fail_together(
        self, participants: Participants, numbers: Numbers
    ) -> AbstractContextManager[None]:
        return self._fail_together(participants, numbers)

    @contextmanager
    def _fail_together(self, participants: Participants, numbers: Numbers) -> Iterator[None]:
        failure: Exception | None = None
        self._raised_together = False
        try:
            with self.same.fail_together(participants, numbers):
                yield
        except Exception as raised:
            if self._raised_together:  # all ranks know it already
                raise
            failure = raised
        self._exchange_status(numbers, failure)

    def _exchange_status(self, numbers: Numbers, failure: Exception | None = None) -> None:
        try:
            tell_least(self.ranks, numbers, failure, consequence=WEIGHTS_MAY_DIFFER)
        except Exception:
            self._raised_together = True
            raise

    def local(self, tensor: Tensor) -> Tensor:
        return local(tensor)

    def total(self, value: Tensor) -> Tensor:
        value = self.same.total(value)
        self._exchange_status({})
        return self.ranks.total(value)

    def send(self, matrices: Sequence[Any]) -> None:
        self.same.send(matrices)

    def finish(self) -> None:
        self.same.finish()

    def forget(self) -> None:
        self.same.forget()

    def any(self, here: bool) -> bool:
        here = self.same.any(here)
        return any(there for (there,) in self.ranks.exchange_status(None, float(here)))

    def stream_sums(
        self, capture: ModelCapture, choose: ChooseOwners, is_last: Callable[[], bool]
    ) -> None:
        self.same.stream_sums(capture, choose, is_last)

    def owners(self, choose: ChooseOwners) -> Mapping[Tensor, int]:
        return self.same.owners(choose)

    def collected(self, mine: list[Any]) -> list[Any]:
        return self.ranks.gather_lists(self.same.collected(mine))

    def consolidated(
        self, state: dict[int, dict[str, Any]], owned: Sequence[int], to: int | None = None
    ) -> dict[int, dict[str, Any]]:
        raise ValueError(
            "the whole state cannot be gathered under tensor parallelism, where each rank has "
            "matrices of its own; save and load with torch.distributed.checkpoint"
        )
