"""The team: which ranks compute which matrices, and what they send each other in a step.

There are three teams. `Alone` sends nothing. In `Replicated` the ranks add up their captured sums,
then each rank computes everything. In `Owners` each matrix has one owner, which keeps the state and
computes the steps of this matrix. The step calls the same methods in the same order for all three.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from torch import Tensor

from gomuon.capture.model import ModelCapture
from gomuon.moments import MomentShapes, Statistics
from gomuon.parameters.layers import Layer
from gomuon.parameters.layout import MatrixParameter
from gomuon.parameters.stacks import Participants

Group = Mapping[str, Any]
Captured = Mapping[int, Mapping[Tensor, Statistics]]  # a rank's statistics, by group
# Returns what is wrong with this rank's gradients (None if nothing is), and its statistics.
LocalCheck = Callable[[], tuple[str | None, Captured]]
Numbers = dict[str, float]
ChooseOwners = Callable[[int], Mapping[Tensor, int]]  # number of ranks -> the owner of each matrix


class Team(Protocol):
    """The ranks that work together in a step."""

    size: int
    """The number of ranks that share the work."""
    averaged: int
    """The number of ranks whose gradients are averaged."""
    rank: int
    waits_for_others: bool
    """Whether this rank may only move its weights if other ranks can."""

    def agree(
        self, check: LocalCheck, method: str, groups: Sequence[Group]
    ) -> tuple[str | None, Captured]:
        """Before anything changes: a fault in any rank's gradients, and this rank's statistics.

        Raises:
            RankError: ranks differ in something that must be equal, or a rank failed. All ranks
                raise.
        """
        ...

    def compare_again(self) -> None:
        """Compare everything again in the next step, as in the first step."""
        ...

    def layers(
        self, matrices: Sequence[MatrixParameter], choose: ChooseOwners
    ) -> tuple[list[Layer], Sequence[Any]]:
        """The layers this rank computes, and the matrices of all ranks if they have owners."""
        ...

    def gather(self, matrices: Sequence[Any], *, weights: bool) -> Callable[[], None]:
        """Start collecting gradients (and weights) on the owners; returns a function that waits."""
        ...

    def sum_statistics(
        self,
        matrices: Sequence[Any],
        seen: Mapping[Tensor, Statistics],
        wanted: Mapping[Tensor, MomentShapes],
    ) -> Mapping[Tensor, Statistics]:
        """The captured sums over all ranks, for the layers this rank computes."""
        ...

    def fail_together(
        self, participants: Participants, numbers: Numbers
    ) -> AbstractContextManager[None]:
        """A context for the work on a group. At its end all ranks raise if one rank failed.

        Each of the `numbers`, which all ranks have under the same names, is then the least over the
        ranks.
        """
        ...

    def local(self, tensor: Tensor) -> Tensor:
        """This rank's part of a tensor."""
        ...

    def total(self, value: Tensor) -> Tensor:
        """The sum of a value over all ranks that compute different matrices."""
        ...

    def send(self, matrices: Sequence[Any]) -> None:
        """Start sending this rank's steps to the others."""
        ...

    def finish(self) -> None:
        """Move the weights by the steps that were sent."""
        ...

    def forget(self) -> None:
        """Drop the messages of a step that failed."""
        ...

    def any(self, here: bool) -> bool:
        """Whether something is true on any rank."""
        ...

    def stream_sums(
        self, capture: ModelCapture, choose: ChooseOwners, is_last: Callable[[], bool]
    ) -> None:
        """From now on send captured sums during backward passes, if there are owners.

        All ranks call this at the same time. `is_last` says whether the running backward pass is
        the last one of its step, as far as is known.
        """
        ...

    def collected(self, mine: list[Any]) -> list[Any]:
        """The small objects of all ranks that compute different matrices, on every rank."""
        ...

    def owners(self, choose: ChooseOwners) -> Mapping[Tensor, int]:
        """The rank that owns each matrix; empty where there are no owners."""
        ...

    def consolidated(
        self, state: dict[int, dict[str, Any]], owned: Sequence[int], to: int | None = None
    ) -> dict[int, dict[str, Any]]:
        """The saved state of all ranks, on rank `to` or on all ranks.

        `owned` are the matrices that only this rank has.
        """
        ...


class Alone:
    """A team of one process. It computes everything and sends nothing."""

    size = 1
    averaged = 1
    rank = 0
    waits_for_others = False

    def agree(
        self, check: LocalCheck, method: str, groups: Sequence[Group]
    ) -> tuple[str | None, Captured]:
        return check()

    def compare_again(self) -> None:
        pass

    def layers(
        self, matrices: Sequence[MatrixParameter], choose: ChooseOwners
    ) -> tuple[list[Layer], Sequence[Any]]:
        return [matrix.layer for matrix in matrices], ()

    def gather(self, matrices: Sequence[Any], *, weights: bool) -> Callable[[], None]:
        return _nothing

    def sum_statistics(
        self,
        matrices: Sequence[Any],
        seen: Mapping[Tensor, Statistics],
        wanted: Mapping[Tensor, MomentShapes],
    ) -> Mapping[Tensor, Statistics]:
        return seen

    def fail_together(
        self, participants: Participants, numbers: Numbers
    ) -> AbstractContextManager[None]:
        return nullcontext()

    def local(self, tensor: Tensor) -> Tensor:
        return tensor

    def total(self, value: Tensor) -> Tensor:
        return value

    def send(self, matrices: Sequence[Any]) -> None:
        pass

    def finish(self) -> None:
        pass

    def forget(self) -> None:
        pass

    def any(self, here: bool) -> bool:
        return here

    def stream_sums(
        self, capture: ModelCapture, choose: ChooseOwners, is_last: Callable[[], bool]
    ) -> None:
        pass

    def collected(self, mine: list[Any]) -> list[Any]:
        return mine

    def owners(self, choose: ChooseOwners) -> Mapping[Tensor, int]:
        return {}

    def consolidated(
        self, state: dict[int, dict[str, Any]], owned: Sequence[int], to: int | None = None
    ) -> dict[int, dict[str, Any]]:
        return state


def _nothing() -> None:
    pass


ALONE = Alone()
