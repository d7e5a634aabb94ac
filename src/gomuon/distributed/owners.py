"""Shared work: each matrix has one owner, which keeps its state and computes its steps.

    gradients   shards → the owner          every step, under FSDP2
    moments     every rank → the owner      on refresh steps
    steps       the owner → every rank      every step: W ← factor·W − step where the rows are

All ranks send the same messages in the same order; the lab's `costs/traffic.py` counts their bytes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gomuon.distributed.agreement import Agreement
from gomuon.distributed.assignment import owners_of
from gomuon.distributed.messages import Inbox, Swap, size_of
from gomuon.distributed.moments import slots_of, statistics_of, sum_to_owners
from gomuon.distributed.owned import Matrix, OwnedLayer
from gomuon.distributed.ranks import UNTOUCHED, Ranks
from gomuon.distributed.replicated import any_rank, working_together
from gomuon.distributed.shards import Holding, holding
from gomuon.distributed.state import consolidated
from gomuon.distributed.team import Captured, ChooseOwners, Group, Look
from gomuon.functional.linalg import working_dtype
from gomuon.geometry.base import Geometry
from gomuon.moments import MomentShapes, Shape, Statistics
from gomuon.parameters.groups import is_matrix, named
from gomuon.parameters.layout import Layout, MatrixParameter
from gomuon.parameters.sharding import local, local_gradient
from gomuon.parameters.stacks import Layer, Participants
from gomuon.parameters.state import COUNT, keep_count


class Owners:
    """Ranks among which every matrix has one owner."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.size = ranks.size
        self.rank = ranks.rank
        self.agreement = Agreement(ranks)
        self._owners: Mapping[Tensor, int] = {}
        self._holdings: dict[Tensor, Holding] = {}
        self._sent: list[tuple[Sequence[Matrix], Swap]] = []

    def agree(
        self, look: Look, method: str, groups: Sequence[Group]
    ) -> tuple[str | None, Captured]:
        return self.agreement.reach(look, method, groups)

    def compare_again(self) -> None:
        self.agreement.compared = False

    def layers(
        self, matrices: Sequence[MatrixParameter], choose: ChooseOwners
    ) -> tuple[list[Layer], Sequence[Matrix]]:
        layers: list[Layer] = []
        owned = []
        for given in matrices:
            if given.parameter not in self._owners:  # at first, and for a group added later
                self._owners = choose(self.size)
            matrix = self._matrix(given)
            owned.append(matrix)
            if matrix.owner == self.rank:
                matrix.layer = OwnedLayer(
                    given.name, given.parameter, given.state, given.spec, given.phase
                )
                layers.append(matrix.layer)
            else:
                keep_count(given.state)
        return layers, owned

    def _matrix(self, given: MatrixParameter) -> Matrix:
        bias = given.spec.bias
        tensors = (given.parameter,) if bias is None else (given.parameter, bias)
        for tensor in tensors:
            if tensor not in self._holdings:
                self._holdings[tensor] = holding(tensor, self.ranks)
        holdings = tuple(self._holdings[tensor] for tensor in tensors)
        owner = self._owners[given.parameter]
        return Matrix(given.name, tensors, given.state, owner, holdings)

    # ---- to the owner ----------------------------------------------------------------------------

    def gather(self, matrices: Sequence[Matrix], *, weights: bool) -> Callable[[], None]:
        if not matrices:
            return lambda: None
        gradients = self._gathered(matrices, [[_gradient(t) for t in m.tensors] for m in matrices])
        whole_weights = (
            self._gathered(matrices, [[local(t) for t in m.tensors] for m in matrices])
            if weights
            else None
        )

        def arrived() -> None:
            for matrix, whole in zip(matrices, gradients(), strict=True):
                if matrix.layer is not None:
                    matrix.layer.whole_gradients = whole
            if whole_weights is not None:
                for matrix, whole in zip(matrices, whole_weights(), strict=True):
                    if matrix.layer is not None:
                        matrix.layer.whole_weights = whole

        return arrived

    def _gathered(
        self, matrices: Sequence[Matrix], mine: Sequence[Sequence[Tensor]]
    ) -> Callable[[], list[list[Tensor]]]:
        """Start making tensors whole on their owners, from the ranks of the owner's replica."""
        me = self.rank
        if not any(h.sharded for matrix in matrices for h in matrix.holdings):
            return lambda: [list(tensors) for tensors in mine]
        outgoing: list[list[Tensor]] = [[] for _ in range(self.size)]
        incoming = [0] * self.size
        for matrix, tensors in zip(matrices, mine, strict=True):
            for tensor, held in zip(tensors, matrix.holdings, strict=True):
                if held.replicas[me] == held.replicas[matrix.owner]:
                    outgoing[matrix.owner].append(tensor)
                if matrix.owner == me:
                    for rank in _replica(held, me):
                        incoming[rank] += size_of(_rows(tensor, held, rank), tensor.dtype)
        swap = self.ranks.swap(outgoing, incoming)

        def joined(tensor: Tensor, held: Holding, inboxes: Sequence[Inbox]) -> Tensor:
            parts = [
                inboxes[rank].take(_rows(tensor, held, rank), tensor.dtype)
                for rank in _replica(held, me)
            ]
            return torch.cat(parts)

        def arrived() -> list[list[Tensor]]:
            inboxes = swap.wait()
            return [
                [joined(t, held, inboxes) for t, held in zip(own, matrix.holdings, strict=True)]
                if matrix.owner == me
                else []
                for matrix, own in zip(matrices, mine, strict=True)
            ]

        return arrived

    def sum_statistics(
        self,
        matrices: Sequence[Matrix],
        seen: Mapping[Tensor, Statistics],
        wanted: Mapping[Tensor, MomentShapes],
    ) -> Mapping[Tensor, Statistics]:
        owners = {matrix.parameter: matrix.owner for matrix in matrices}
        slots = slots_of(owners, seen, wanted, inputs_agree=self.agreement.inputs_agree)
        return statistics_of(slots, sum_to_owners(slots, self.ranks))

    # ---- the work, and its end -------------------------------------------------------------------

    @contextmanager
    def together(self, participants: Participants) -> Iterator[None]:
        with working_together(self.ranks, participants.layers, left=UNTOUCHED):
            yield
        for matrix in participants.matrices:
            if matrix.layer is None:  # the owner counts its own
                matrix.state[COUNT] = matrix.state.get(COUNT, 0) + 1

    def local(self, tensor: Tensor) -> Tensor:
        return local(tensor)

    def total(self, value: Tensor) -> Tensor:
        self.ranks.agree()
        return self.ranks.total(value)

    def any(self, here: bool) -> bool:
        return any_rank(self.ranks, here)

    def forget(self) -> None:
        self._sent = []

    # ---- from the owner --------------------------------------------------------------------------

    def send(self, matrices: Sequence[Matrix]) -> None:
        if not matrices:
            return
        outgoing: list[list[Tensor]] = [[] for _ in range(self.size)]
        incoming = [0] * self.size
        for matrix in matrices:
            for index, (tensor, held) in enumerate(
                zip(matrix.tensors, matrix.holdings, strict=True)
            ):
                shape = _rows(tensor, held, self.rank)
                incoming[matrix.owner] += size_of(shape, working_dtype(tensor))
                incoming[matrix.owner] += size_of((), torch.float64)
                if matrix.layer is not None:
                    for rank in range(self.size):
                        outgoing[rank] += matrix.layer.message(index, held.rows[rank])
        self._sent.append((matrices, self.ranks.swap(outgoing, incoming)))

    def finish(self) -> None:
        for matrices, swap in self._sent:
            self._apply(matrices, swap)
        self._sent.clear()

    def _apply(self, matrices: Sequence[Matrix], swap: Swap) -> None:
        """W ← factor·W − step, each rank its own rows."""
        inboxes = swap.wait()
        for matrix in matrices:
            for tensor, held in zip(matrix.tensors, matrix.holdings, strict=True):
                dtype = working_dtype(tensor)
                factor = inboxes[matrix.owner].take((), torch.float64)
                step = inboxes[matrix.owner].take(_rows(tensor, held, self.rank), dtype)
                rows = local(tensor)
                if tensor.grad is not None:  # a frozen bias stays
                    rows.copy_(factor * rows.to(dtype) - step)
            if matrix.layer is not None:
                matrix.layer.forget()

    # ---- state -----------------------------------------------------------------------------------

    def owners(self, choose: ChooseOwners) -> Mapping[Tensor, int]:
        return choose(self.size)

    def consolidated(
        self, state: dict[int, dict[str, Any]], owned: Sequence[int]
    ) -> dict[int, dict[str, Any]]:
        return consolidated(state, owned, self.ranks) if state else state


def choose_owners(
    groups: Sequence[Group],
    settings: Group,
    geometry: Geometry,
    layout: Layout,
    ranks: int,
) -> dict[Tensor, int]:
    """An owner for every matrix, group by group.

    From names, shapes and the constructor's settings, which never change. A group's own settings
    may change when a checkpoint is loaded, and state must not move to another owner then.

    Args:
        groups: the optimizer's.
        settings: the constructor's.
        geometry: the method's.
        layout: how parameters are cut.
        ranks: how many there are.
    """
    owners: dict[Tensor, int] = {}
    captured = geometry.captured_sides(settings)
    joined = {spec.bias for spec in layout.specs.values()}
    for index, group in enumerate(groups):
        matrices = [
            Layer(name, parameter, {}, layout.spec_of(parameter, settings))
            for name, parameter in named(group, index)
            if is_matrix(group, parameter) and parameter.numel() and parameter not in joined
        ]
        chosen = owners_of(
            [matrix.name for matrix in matrices],
            [(matrix.blocks, *matrix.shape) for matrix in matrices],
            settings.get("refresh_every"),
            ranks,
            together=geometry.reads_weights or any(captured),
            sides=captured if any(captured) else (True, True),
        )
        owners.update(zip([m.parameter for m in matrices], chosen, strict=True))
    for weight, spec in layout.specs.items():
        if spec.bias is not None:  # it is a matrix of its own while its weight is frozen
            owners[spec.bias] = owners.get(weight, 0)
    return owners


def _gradient(tensor: Tensor) -> Tensor:
    gradient = local_gradient(tensor)
    return torch.zeros_like(local(tensor)) if gradient is None else gradient


def _replica(held: Holding, me: int) -> list[int]:
    """Ranks of this rank's replica, sorted by first row."""
    if not held.sharded:
        return [me]
    ranks = [r for r in range(len(held.rows)) if held.replicas[r] == held.replicas[me]]
    return sorted(ranks, key=lambda rank: (held.rows[rank], rank))


def _rows(tensor: Tensor, held: Holding, rank: int) -> Shape:
    begin, end = held.rows[rank]
    return (end - begin, *tensor.shape[1:])
