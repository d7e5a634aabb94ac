"""Shared work: each matrix has one owner, which keeps its state and computes its steps.

    gradients   shards → the owner          every step, under FSDP2
    moments     every rank → the owner      on refresh steps
    steps       the owner → every rank      every step: W ← factor·W − step, each rank its rows

All ranks send the same messages in the same order. The lab's `costs/traffic.py` counts the bytes.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from gomuon.capture.model import ModelCapture
from gomuon.distributed.agreement import Agreement
from gomuon.distributed.assignment import owners_of
from gomuon.distributed.divided_state import consolidated
from gomuon.distributed.messages import Exchange, Inbox, size_of
from gomuon.distributed.own_parameters import refuse_own, shared_groups
from gomuon.distributed.owned import OwnedLayer, OwnedMatrix, OwnLayer
from gomuon.distributed.ranks import NOTHING_CHANGED, Ranks
from gomuon.distributed.replicated import any_rank, fail_together
from gomuon.distributed.shards import RowRanges, find_row_ranges
from gomuon.distributed.stream import SumStream
from gomuon.distributed.sums import added, slots_of, statistics_of, sum_to_owners
from gomuon.distributed.team import Captured, ChooseOwners, Group, LocalCheck, Numbers
from gomuon.errors import RankError
from gomuon.functional.linalg import working_dtype
from gomuon.geometry.base import Geometry
from gomuon.intervals import shortest
from gomuon.moments import MomentShapes, Statistics
from gomuon.parameters.groups import is_matrix, named
from gomuon.parameters.layers import Layer
from gomuon.parameters.layout import Layout, MatrixParameter
from gomuon.parameters.sharding import local, local_gradient
from gomuon.parameters.side_forms import captured_maps
from gomuon.parameters.stacks import Participants
from gomuon.parameters.state import COUNT, keep_only_count
from gomuon.parameters.tensor_shards import TensorShard


class Owners:
    """A team of ranks in which every matrix has one owner."""

    def __init__(
        self,
        ranks: Ranks,
        shards: Mapping[Tensor, TensorShard] = MappingProxyType({}),
        own: Collection[Tensor] = (),
    ) -> None:
        self.ranks = ranks
        self._own = own  # parameters that only this rank has
        self._own_layers: dict[Tensor, OwnLayer] = {}
        self._shards = shards  # under tensor parallelism these ranks have the same blocks
        self.size = self.averaged = ranks.size
        self.rank = ranks.rank
        self.waits_for_others = ranks.size > 1
        self.agreement = Agreement(ranks, own)
        self._owners: Mapping[Tensor, int] = {}
        self._row_ranges: dict[Tensor, RowRanges] = {}
        self._sent: list[tuple[Sequence[OwnedMatrix], Exchange]] = []
        self._stream: SumStream | None = None

    def agree(
        self, check: LocalCheck, method: str, groups: Sequence[Group]
    ) -> tuple[str | None, Captured]:
        stream = self._stream
        if stream is None:
            return self.agreement.before_step(check, method, groups)
        try:
            fault, captured = self.agreement.before_step(stream.checked(check), method, groups)
        except Exception as failure:
            # All ranks raise. Unless a message failed, the messages of the backward pass can match.
            if not (isinstance(failure, RankError) and failure.__cause__ is not None):
                stream.finish({}, keep=False)
            raise
        return fault, stream.finish(captured, keep=fault is None) if captured else captured

    def stream_sums(
        self, capture: ModelCapture, choose: ChooseOwners, is_last: Callable[[], bool]
    ) -> None:
        if self._stream is None and self.size > 1:
            owners = partial(choose, self.size)
            self._stream = SumStream(self.ranks, self.averaged, capture, owners, is_last)
            capture.listen(self._stream.advance)

    def compare_again(self) -> None:
        self.agreement.compared = False

    def layers(
        self, matrices: Sequence[MatrixParameter], choose: ChooseOwners
    ) -> tuple[list[Layer], Sequence[OwnedMatrix]]:
        layers: list[Layer] = []
        owned = []
        for given in matrices:
            if given.parameter in self._own:
                self._own_layers[given.parameter] = given.layer_as(OwnLayer)
                layers.append(self._own_layers[given.parameter])
                continue
            if given.parameter not in self._owners:  # at the first step, and for an added group
                self._owners = choose(self.size)
            matrix = self._matrix(given)
            owned.append(matrix)
            if matrix.owner == self.rank:
                matrix.layer = given.layer_as(OwnedLayer)
                layers.append(matrix.layer)
            else:
                keep_only_count(given.state)
        return layers, owned

    def _matrix(self, given: MatrixParameter) -> OwnedMatrix:
        bias = given.spec.bias
        tensors = (given.parameter,) if bias is None else (given.parameter, bias)
        for tensor in tensors:
            if tensor not in self._row_ranges:
                self._row_ranges[tensor] = self._find_row_ranges(tensor)
        row_ranges = tuple(self._row_ranges[tensor] for tensor in tensors)
        owner = self._owners[given.parameter]
        return OwnedMatrix(given.name, tensors, given.state, owner, row_ranges)

    def _find_row_ranges(self, tensor: Tensor) -> RowRanges:
        return find_row_ranges(tensor, self.ranks, self._shards)

    # ---- to the owner ----------------------------------------------------------------------------

    def gather(self, matrices: Sequence[OwnedMatrix], *, weights: bool) -> Callable[[], None]:
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
        self, matrices: Sequence[OwnedMatrix], local_tensors: Sequence[Sequence[Tensor]]
    ) -> Callable[[], list[list[Tensor]]]:
        """Start collecting whole tensors on their owners, from the ranks of the owner's replica."""
        own_rank = self.rank
        if not any(h.sharded for matrix in matrices for h in matrix.row_ranges):
            return lambda: [list(tensors) for tensors in local_tensors]
        outgoing: list[list[Tensor]] = [[] for _ in range(self.size)]
        incoming = [0] * self.size
        for matrix, tensors in zip(matrices, local_tensors, strict=True):
            for tensor, ranges in zip(tensors, matrix.row_ranges, strict=True):
                if ranges.replicas[own_rank] == ranges.replicas[matrix.owner]:
                    outgoing[matrix.owner].append(tensor)
                if matrix.owner == own_rank:
                    for rank in _replica(ranges, own_rank):
                        incoming[rank] += size_of(ranges.shape(rank), tensor.dtype)
        exchange = self.ranks.start_exchange(outgoing, incoming)

        def joined(tensor: Tensor, ranges: RowRanges, inboxes: Sequence[Inbox]) -> Tensor:
            replica = _replica(ranges, own_rank)
            parts = [inboxes[rank].take(ranges.shape(rank), tensor.dtype) for rank in replica]
            return ranges.joined(replica, parts)

        def arrived() -> list[list[Tensor]]:
            inboxes = exchange.wait()
            return [
                [
                    joined(t, ranges, inboxes)
                    for t, ranges in zip(own, matrix.row_ranges, strict=True)
                ]
                if matrix.owner == own_rank
                else []
                for matrix, own in zip(matrices, local_tensors, strict=True)
            ]

        return arrived

    def sum_statistics(
        self,
        matrices: Sequence[OwnedMatrix],
        seen: Mapping[Tensor, Statistics],
        wanted: Mapping[Tensor, MomentShapes],
    ) -> Mapping[Tensor, Statistics]:
        summed = self._summed(matrices, seen, wanted)
        own = {p: seen[p] for p in self._own if p in seen}
        return {**summed, **own} if own else summed

    def _summed(
        self,
        matrices: Sequence[OwnedMatrix],
        seen: Mapping[Tensor, Statistics],
        wanted: Mapping[Tensor, MomentShapes],
    ) -> Mapping[Tensor, Statistics]:
        owners = {matrix.parameter: matrix.owner for matrix in matrices}
        stream = self._stream
        if stream is None or stream.received is None:
            slots = slots_of(owners, seen, wanted, inputs_agree=self.agreement.inputs_agree)
            return statistics_of(slots, sum_to_owners(slots, self.ranks))
        if not stream.residue:
            return stream.received
        slots = slots_of(owners, seen, wanted, inputs_agree=False)
        rest = statistics_of(slots, sum_to_owners(slots, self.ranks))
        return {p: added(stream.received.get(p), rest.get(p)) for p in owners}

    # ---- the work on a group ---------------------------------------------------------------------

    @contextmanager
    def fail_together(self, participants: Participants, numbers: Numbers) -> Iterator[None]:
        layers = participants.layers
        with fail_together(self.ranks, layers, numbers, consequence=NOTHING_CHANGED):
            yield
        for matrix in participants.matrices:
            if matrix.layer is None:  # the owner counts its own updates
                matrix.state[COUNT] = matrix.state.get(COUNT, 0) + 1

    def local(self, tensor: Tensor) -> Tensor:
        return local(tensor)

    def total(self, value: Tensor) -> Tensor:
        self.ranks.exchange_status()
        return self.ranks.total(value)

    def any(self, here: bool) -> bool:
        return any_rank(self.ranks, here)

    def forget(self) -> None:
        self._sent = []
        for layer in self._own_layers.values():
            layer.forget()
        if self._stream is not None:
            self._stream.received = None

    # ---- from the owner --------------------------------------------------------------------------

    def send(self, matrices: Sequence[OwnedMatrix]) -> None:
        if not matrices:
            return
        outgoing: list[list[Tensor]] = [[] for _ in range(self.size)]
        incoming = [0] * self.size
        for matrix in matrices:
            for index, (tensor, ranges) in enumerate(
                zip(matrix.tensors, matrix.row_ranges, strict=True)
            ):
                shape = ranges.shape(self.rank)
                incoming[matrix.owner] += size_of(shape, working_dtype(tensor))
                incoming[matrix.owner] += size_of((), torch.float64)
                if matrix.layer is not None:
                    for rank in range(self.size):
                        outgoing[rank] += matrix.layer.message(index, ranges, rank)
        self._sent.append((matrices, self.ranks.start_exchange(outgoing, incoming)))

    def finish(self) -> None:
        for matrices, exchange in self._sent:
            self._apply(matrices, exchange)
        for layer in self._own_layers.values():
            layer.apply()
        self.forget()

    def _apply(self, matrices: Sequence[OwnedMatrix], exchange: Exchange) -> None:
        """W ← factor·W − step, each rank its own rows."""
        inboxes = exchange.wait()
        for matrix in matrices:
            for tensor, ranges in zip(matrix.tensors, matrix.row_ranges, strict=True):
                dtype = working_dtype(tensor)
                factor = inboxes[matrix.owner].take((), torch.float64)
                step = inboxes[matrix.owner].take(ranges.shape(self.rank), dtype)
                rows = local(tensor)
                if tensor.grad is not None:  # a frozen bias does not move
                    rows.copy_(factor * rows.to(dtype) - step)
            if matrix.layer is not None:
                matrix.layer.forget()

    # ---- state -----------------------------------------------------------------------------------

    def owners(self, choose: ChooseOwners) -> Mapping[Tensor, int]:
        return choose(self.size)

    def collected(self, mine: list[Any]) -> list[Any]:
        return self.ranks.gather_lists(mine)

    def consolidated(
        self, state: dict[int, dict[str, Any]], owned: Sequence[int], to: int | None = None
    ) -> dict[int, dict[str, Any]]:
        refuse_own(self.ranks, self._own)
        return consolidated(state, owned, self.ranks, to) if state else state


def choose_owners(
    groups: Sequence[Group],
    settings: Group,
    geometry: Geometry,
    layout: Layout,
    ranks: int,
) -> dict[Tensor, int]:
    """An owner for every matrix, group by group.

    The choice depends on names, shapes and the constructor's settings, which never change. It does
    not depend on a group's own settings: a checkpoint may change them, and the state must not move
    to another owner then.

    Args:
        groups: the optimizer's parameter groups.
        settings: the constructor's settings.
        geometry: the method's geometry.
        layout: how parameters are cut into matrices.
        ranks: the number of ranks.
    """
    owners: dict[Tensor, int] = {}
    captured = geometry.captured_sides(settings)
    own = layout.own
    joined = {spec.bias for spec in layout.specs.values()}
    for index, group in enumerate(shared_groups(groups, own) if own else groups):
        matrices = [
            Layer(name, parameter, {}, layout.spec_of(parameter, settings))
            for name, parameter in named(group, index)
            if is_matrix(group, parameter) and parameter.numel() and parameter not in joined
        ]
        chosen = owners_of(
            [matrix.name for matrix in matrices],
            [(matrix.blocks, *matrix.shape) for matrix in matrices],
            shortest(settings.get("refresh_every")),
            ranks,
            together=geometry.reads_weights or any(captured),
            maps=[captured_maps(matrix.forms, captured) for matrix in matrices]
            if any(captured) and not geometry.reads_weights  # then partners stay together
            else None,
            group=index,
        )
        owners.update(zip([m.parameter for m in matrices], chosen, strict=True))
    for weight, spec in layout.specs.items():
        if (
            spec.bias is not None and weight not in own
        ):  # a bias is a separate matrix while its weight is frozen
            owners[spec.bias] = owners.get(weight, 0)
    return owners


def _gradient(tensor: Tensor) -> Tensor:
    gradient = local_gradient(tensor)
    return torch.zeros_like(local(tensor)) if gradient is None else gradient


def _replica(ranges: RowRanges, own_rank: int) -> list[int]:
    """Ranks of this rank's replica, sorted by first row."""
    if not ranges.sharded:
        return [own_rank]
    ranks = [r for r in range(len(ranges.rows)) if ranges.replicas[r] == ranges.replicas[own_rank]]
    return sorted(ranks, key=lambda rank: (ranges.rows[rank], rank))
