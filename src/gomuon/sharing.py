"""Several ranks, one optimizer: who owns what, and the messages between owners and the others."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from gomuon.agreeing import AgreeingOptimizer
from gomuon.capture import Statistics
from gomuon.consolidation import COUNT, consolidated, settled
from gomuon.errors import GeometryWarning, RankError, naming
from gomuon.exchange import Exchange, Matrix
from gomuon.groups import is_matrix, named
from gomuon.holdings import local_gradient
from gomuon.layers import Layer, LayerSpec
from gomuon.ownership import owners_of
from gomuon.parallel import over_ranks
from gomuon.ranks import MOVED, UNTOUCHED, Swap
from gomuon.stacks import Roll

Group = Mapping[str, Any]


class SharingOptimizer(AgreeingOptimizer):
    """An optimizer whose matrices have owners when several ranks share the work.

    Otherwise `_exchange` is None: alone nothing here does anything, and where everyone does
    everything only the captured sums travel.
    """

    _owners: dict[Tensor, int]
    _under_way: list[tuple[Sequence[Matrix], Swap]]
    _spec_of: Callable[[Tensor, Group], LayerSpec]

    def _forget_ranks(self) -> None:
        super()._forget_ranks()
        self._owners = {}
        self._under_way = []

    def _forget_messages(self) -> None:
        """Let go of what a step that failed had collected and had under way."""
        self._collected = {}
        self._under_way = []

    # ---- owners ----------------------------------------------------------------------------------

    def _choose_owners(self, ranks: int) -> dict[Tensor, int]:
        """An owner for every matrix, group by group.

        From names, shapes and the constructor's settings, which nothing changes: a group's own may
        change when a checkpoint is loaded, and its state must not change hands.
        """
        owners: dict[Tensor, int] = {}
        geometry, settings = self.recipe.geometry, self.defaults
        captured = geometry.captured_sides(settings)
        joined = {spec.bias for spec in self._specs.values()}
        for index, group in enumerate(self.param_groups):
            matrices = [
                Layer(name, parameter, {}, self._spec_of(parameter, settings))
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
        for weight, spec in self._specs.items():
            if spec.bias is not None:  # a matrix of its own while its weight is frozen
                owners[spec.bias] = owners.get(weight, 0)
        return owners

    def owners(self) -> dict[str, int]:
        """The rank that keeps each matrix's state and makes its steps; empty when alone.

        A bias that joins its weight has its weight's owner.
        """
        exchange = self._exchange
        if exchange is None:
            return {}
        owners = self._choose_owners(exchange.ranks.size)
        return {
            name: owners[parameter]
            for index, group in enumerate(self.param_groups)
            for name, parameter in named(group, index)
            if parameter in owners
        }

    def _matrix(self, name: str, parameter: Tensor, spec: LayerSpec) -> Matrix:
        assert self._exchange is not None
        if parameter not in self._owners:  # a group that came later
            self._owners = self._choose_owners(self._exchange.ranks.size)
        tensors = [parameter] if spec.bias is None else [parameter, spec.bias]
        return self._exchange.matrix(name, tensors, self._owners[parameter])

    # ---- the messages --------------------------------------------------------------------------

    def _receive(self, matrices: Sequence[Matrix], group: Group) -> Callable[[], None]:
        """Start to collect gradients, and weights if they are read; returns what waits for them."""
        exchange = self._exchange
        if exchange is None or not matrices:
            return lambda: None
        waiting = [exchange.gather_gradients(matrices)]
        if group.get("geometry_decay") or self.recipe.geometry.reads_weights:
            waiting.append(exchange.gather_weights(matrices))

        def arrived() -> None:
            for wait in waiting:
                wait()

        return arrived

    def _seen(self, index: int, matrices: Sequence[Matrix]) -> dict[Tensor, Statistics]:
        """What was captured for a group in this step, on all ranks together."""
        capture, ranks, exchange = self._captures[index], self._ranks, self._exchange
        if not capture.window.open:
            return {}
        if ranks is None:
            return self._local_statistics(index, 1)
        seen, wanted = self._collected.pop(index), capture.shapes()
        if exchange is None:
            return over_ranks(seen, wanted, ranks, shared=self._shared)
        return exchange.gather_moments(matrices, seen, wanted, shared=self._shared)

    @contextmanager
    def _together(self, roll: Roll) -> Iterator[None]:
        """Work that ends with all ranks knowing whether it went well everywhere."""
        ranks = self._ranks
        if ranks is None:
            yield
            return
        failure: Exception | None = None
        try:
            with naming([layer for stack in roll.stacks for layer in stack.layers]):
                yield
        except RankError:
            raise
        except Exception as raised:
            failure = raised
        ranks.agree(failure, left=MOVED if self._exchange is None else UNTOUCHED)
        for matrix in roll.matrices:
            if matrix.layer is None:  # its owner has counted
                entries = self.state[matrix.parameter]
                entries[COUNT] = entries.get(COUNT, 0) + 1

    def _total(self, value: Tensor) -> Tensor:
        """The sum over all owners."""
        exchange = self._exchange
        if exchange is None:
            return value
        exchange.ranks.agree()
        return exchange.ranks.total(value)

    def _send(self, matrices: Sequence[Matrix]) -> None:
        """Start sending steps; other work may go on meanwhile."""
        if self._exchange is not None and matrices:
            self._under_way.append((matrices, self._exchange.send_steps(matrices)))

    def _arrive(self) -> None:
        """Move the weights, once every group's steps are computed everywhere."""
        for matrices, swap in self._under_way:
            assert self._exchange is not None
            self._exchange.apply_steps(matrices, swap)
        self._under_way.clear()

    # ---- state, of which every rank has a part ---------------------------------------------------

    def consolidated_state_dict(self) -> dict[str, Any]:
        """The whole state as one process would save it, on every rank; all ranks must call it.

        `state_dict()` has what this rank holds: its own matrices, its own rows. Both can be loaded
        on any number of ranks. Through torch.distributed.checkpoint no rank ever holds all of it.
        """
        state_dict, exchange = self.state_dict(), self._exchange
        if exchange is None:
            return state_dict
        parameters = [p for group in self.param_groups for p in group["params"]]
        owners = self._choose_owners(exchange.ranks.size)
        owned = [n for n, p in enumerate(parameters) if owners.get(p) == exchange.ranks.rank]
        if state_dict["state"]:
            state_dict["state"] = consolidated(state_dict["state"], owned, exchange.ranks)
        return state_dict

    def _let_go(self, exchange: Exchange | None) -> None:
        """Let go of what other ranks own; tell of what should have come and did not."""
        owners = {} if exchange is None else self._choose_owners(exchange.ranks.size)
        rank = 0 if exchange is None else exchange.ranks.rank
        lacking = settled(self.state, self.param_groups, owners, rank)
        if lacking:
            warnings.warn(
                f"the checkpoint lacks the state of {lacking[0]!r} and {len(lacking) - 1} more, "
                "which begin anew: it looks like one rank's part. Save with "
                "consolidated_state_dict() or torch.distributed.checkpoint",
                GeometryWarning,
                stacklevel=4,
            )


def local_gradients(groups: Sequence[Group]) -> Iterator[tuple[str, Tensor | None]]:
    """Names and what this rank holds of their gradients."""
    for index, group in enumerate(groups):
        for name, parameter in named(group, index):
            yield name, local_gradient(parameter)
