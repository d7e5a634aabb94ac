"""What travels when every matrix has an owner.

    gradients   shards → the owner          every step, under FSDP2
    moments     every rank → the owner      on refresh steps
    steps       the owner → every rank      every step: W ← factor·W − step where the rows are

The owner alone keeps a matrix's state and sees it whole. All ranks go through the same messages in
the same order; `traffic` counts their bytes.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gomuon.capture import Statistics
from gomuon.holdings import Holding, holding, is_sharded, local, local_gradient
from gomuon.layers import Layer
from gomuon.probes import Moment, Shape, working_dtype
from gomuon.ranks import Inbox, Ranks, Swap, size_of

Wanted = tuple[Shape | None, Shape | None]  # shapes of the two moments: inputs, gradients


@dataclass(eq=False)
class Matrix:
    """A matrix parameter (and the bias that joins it), seen by all ranks."""

    name: str
    tensors: tuple[Tensor, ...]
    owner: int
    holdings: tuple[Holding, ...]
    layer: "OwnedLayer | None" = None  # on its owner

    @property
    def parameter(self) -> Tensor:
        return self.tensors[0]


@dataclass(eq=False)
class OwnedLayer(Layer):
    """A layer on its owner: whole gradients come in, whole steps go out."""

    whole_gradients: Sequence[Tensor] = ()
    whole_weights: Sequence[Tensor] = ()
    factor: float | Tensor = 1.0
    steps: Sequence[Tensor] = ()

    @property
    def weights(self) -> Tensor:
        return self._joined(self.whole_weights or [self.parameter, *self._bias])

    @property
    def whole_weight(self) -> Tensor:
        if not self.whole_weights and is_sharded(self.parameter):  # only state is made
            shape, device = self.parameter.shape, self.parameter.device
            return torch.zeros(shape, dtype=self.parameter.dtype, device=device)
        return self.whole_weights[0] if self.whole_weights else self.parameter

    @property
    def gradients(self) -> Tensor:
        if not self.whole_gradients:  # only state is made, see `persistence`
            return torch.zeros_like(self.recall(""))
        return self._joined(self.whole_gradients)

    def move(self, factor: float | Tensor, step: Tensor) -> None:
        """Keep the step; the weights move when every rank has its rows of it."""
        whole = self._whole(step)
        bias = [whole[:, -1]] if self.spec.bias is not None else []
        whole = whole[:, :-1] if self.spec.bias is not None else whole
        whole = whole.mT if self.spec.transposed else whole
        self.factor, self.steps = factor, [whole.reshape(self.parameter.shape), *bias]

    def message(self, index: int, rows: tuple[int, int]) -> list[Tensor]:
        """Those rows of the step of the weight (0) or the bias (1), and the factor of the old."""
        tensor = (self.parameter, *self._bias)[index]
        begin, end = rows
        if not self.steps:  # only observed, not moved
            shape = (end - begin, *tensor.shape[1:])
            step = torch.zeros(shape, dtype=self.dtype, device=tensor.device)
        else:
            step = self.steps[index][begin:end]
        return [torch.as_tensor(self.factor, dtype=torch.float64, device=step.device), step]

    def forget(self) -> None:
        """Let go of what belongs to one step."""
        self.whole_gradients = self.whole_weights = self.steps = ()
        self.factor = 1.0

    @property
    def is_direct(self) -> bool:
        return False

    @property
    def _bias(self) -> list[Tensor]:
        return [] if self.spec.bias is None else [self.spec.bias]

    def _joined(self, tensors: Sequence[Tensor]) -> Tensor:
        return self._matrices(tensors[0], tensors[1] if len(tensors) > 1 else None)


class Exchange:
    """The messages of one optimizer's steps."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._holdings: dict[Tensor, Holding] = {}

    def matrix(self, name: str, tensors: Iterable[Tensor], owner: int) -> Matrix:
        tensors = tuple(tensors)
        for tensor in tensors:
            if tensor not in self._holdings:
                self._holdings[tensor] = holding(tensor, self.ranks)
        return Matrix(name, tensors, owner, tuple(self._holdings[t] for t in tensors))

    # ---- to the owner ----------------------------------------------------------------------------

    def gather_gradients(self, matrices: Sequence[Matrix]) -> Callable[[], None]:
        """Start to give every owned layer its whole gradients; returns what waits for them."""
        gathered = self._gathered(matrices, [[_gradient(t) for t in m.tensors] for m in matrices])

        def arrived() -> None:
            for matrix, whole in zip(matrices, gathered(), strict=True):
                if matrix.layer is not None:
                    matrix.layer.whole_gradients = whole

        return arrived

    def gather_weights(self, matrices: Sequence[Matrix]) -> Callable[[], None]:
        """The same for weights, for methods that look at them."""
        gathered = self._gathered(matrices, [[local(t) for t in m.tensors] for m in matrices])

        def arrived() -> None:
            for matrix, whole in zip(matrices, gathered(), strict=True):
                if matrix.layer is not None:
                    matrix.layer.whole_weights = whole

        return arrived

    def _gathered(
        self, matrices: Sequence[Matrix], mine: Sequence[Sequence[Tensor]]
    ) -> Callable[[], list[list[Tensor]]]:
        """Whole tensors on their owners, of the rows every rank of the owner's replica has."""
        me, size = self.ranks.rank, self.ranks.size
        sharded = any(h.sharded for matrix in matrices for h in matrix.holdings)
        if not sharded:
            return lambda: [list(tensors) for tensors in mine]
        outgoing: list[list[Tensor]] = [[] for _ in range(size)]
        incoming = [0] * size
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

    def gather_moments(
        self,
        matrices: Sequence[Matrix],
        seen: Mapping[Tensor, Statistics],
        wanted: Mapping[Tensor, Wanted],
        *,
        shared: bool,
    ) -> dict[Tensor, Statistics]:
        """Sums over all ranks, on each matrix's owner; a rank that saw nothing adds zeros.

        `shared` says that all ranks agree on who reads the same inputs. Such layers' inputs travel
        once to each owner.
        """
        plan = self._moments_in_order(matrices, seen, wanted, shared)
        me, size = self.ranks.rank, self.ranks.size
        outgoing: list[list[Tensor]] = [[] for _ in range(size)]
        incoming = [0] * size
        for _, _, owner, shape, dtype, moment in plan:
            outgoing[owner] += self._message(moment, shape, dtype)
            if owner == me:
                each = size_of(shape, dtype) + size_of((2,), torch.float64)
                incoming = [bytes_so_far + each for bytes_so_far in incoming]
        inboxes = self.ranks.swap(outgoing, incoming).wait()
        sums: dict[tuple[Tensor, str], Moment | None] = {}
        for parameters, side, owner, shape, dtype, _ in plan:
            if owner == me:
                pairs = [
                    (inbox.take(shape, dtype), inbox.take((2,), torch.float64)) for inbox in inboxes
                ]
                # In the order of the ranks, so that the sum does not depend on who arrives first.
                count, uses = torch.stack([counts for _, counts in pairs]).sum(0)
                total = torch.stack([part for part, _ in pairs]).sum(0)
                moment = Moment(total, count, uses) if float(count) else None
                sums.update({(parameter, side): moment for parameter in parameters})
        return {
            matrix.parameter: Statistics(
                sums.get((matrix.parameter, "inputs")), sums.get((matrix.parameter, "gradients"))
            )
            for matrix in matrices
            if matrix.owner == me
        }

    def _moments_in_order(
        self,
        matrices: Sequence[Matrix],
        seen: Mapping[Tensor, Statistics],
        wanted: Mapping[Tensor, Wanted],
        shared: bool,
    ) -> list[tuple[list[Tensor], str, int, Shape, torch.dtype, Moment | None]]:
        """What is sent, in one order for all: (for whom, side, to whom, shape, dtype, my sum)."""
        plan: list[tuple[list[Tensor], str, int, Shape, torch.dtype, Moment | None]] = []
        leaders: dict[tuple[int, int], int] = {}
        for matrix in matrices:
            parameter = matrix.parameter
            mine = seen.get(parameter, Statistics(None, None))
            for side, shape in zip(
                ("inputs", "gradients"), wanted.get(parameter, (None, None)), strict=True
            ):
                if shape is None:
                    continue
                moment: Moment | None = getattr(mine, side)
                key = (id(moment), matrix.owner)
                if side == "inputs" and shared and moment is not None and key in leaders:
                    plan[leaders[key]][0].append(parameter)
                    continue
                if side == "inputs" and moment is not None:
                    leaders[key] = len(plan)
                dtype = working_dtype(parameter)
                plan.append(([parameter], side, matrix.owner, shape, dtype, moment))
        return plan

    def _message(self, moment: Moment | None, shape: Shape, dtype: torch.dtype) -> list[Tensor]:
        device = self.ranks.device
        if moment is None:
            zeros = torch.zeros(shape, dtype=dtype, device=device)
            return [zeros, torch.zeros(2, dtype=torch.float64, device=device)]
        return [moment.total.to(dtype), torch.stack([moment.count, moment.uses])]

    # ---- from the owner --------------------------------------------------------------------------

    def send_steps(self, matrices: Sequence[Matrix]) -> Swap:
        """Start to send every rank its rows of the owned layers' steps."""
        me, size = self.ranks.rank, self.ranks.size
        outgoing: list[list[Tensor]] = [[] for _ in range(size)]
        incoming = [0] * size
        for matrix in matrices:
            for index, (tensor, held) in enumerate(
                zip(matrix.tensors, matrix.holdings, strict=True)
            ):
                shape = _rows(tensor, held, me)
                incoming[matrix.owner] += size_of(shape, working_dtype(tensor))
                incoming[matrix.owner] += size_of((), torch.float64)
                if matrix.layer is not None:
                    for rank in range(size):
                        outgoing[rank] += matrix.layer.message(index, held.rows[rank])
        return self.ranks.swap(outgoing, incoming)

    def apply_steps(self, matrices: Sequence[Matrix], swap: Swap) -> None:
        """W ← factor·W − step, each rank its own rows."""
        inboxes, me = swap.wait(), self.ranks.rank
        for matrix in matrices:
            for tensor, held in zip(matrix.tensors, matrix.holdings, strict=True):
                dtype = working_dtype(tensor)
                factor = inboxes[matrix.owner].take((), torch.float64)
                step = inboxes[matrix.owner].take(_rows(tensor, held, me), dtype)
                rows = local(tensor)
                if tensor.grad is not None:  # a frozen bias stays
                    rows.copy_(factor * rows.to(dtype) - step)
            if matrix.layer is not None:
                matrix.layer.forget()


def _gradient(tensor: Tensor) -> Tensor:
    gradient = local_gradient(tensor)
    return torch.zeros_like(local(tensor)) if gradient is None else gradient


def _replica(held: Holding, me: int) -> list[int]:
    """The ranks that hold what I do not, and I, in the order of their rows."""
    if not held.sharded:
        return [me]
    ranks = [r for r in range(len(held.rows)) if held.replicas[r] == held.replicas[me]]
    return sorted(ranks, key=lambda rank: (held.rows[rank], rank))


def _rows(tensor: Tensor, held: Holding, rank: int) -> Shape:
    begin, end = held.rows[rank]
    return (end - begin, *tensor.shape[1:])
