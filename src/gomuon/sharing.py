"""Several ranks, one optimizer: who owns what, agreement before every message, and the messages."""

import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from gomuon.agreement import description, first_difference, first_reader
from gomuon.capture import Statistics
from gomuon.consolidation import COUNT, consolidated, settled
from gomuon.errors import GeometryWarning, RankError, naming
from gomuon.exchange import Exchange, Matrix
from gomuon.groups import is_matrix, named
from gomuon.holdings import is_sharded, local, local_gradient
from gomuon.layers import Layer, LayerSpec
from gomuon.ownership import owners_of
from gomuon.parallel import over_ranks
from gomuon.ranks import Ranks, Swap, checksum, is_distributed
from gomuon.watching import WatchingOptimizer

Group = Mapping[str, Any]


class SharingOptimizer(WatchingOptimizer):
    """An optimizer whose matrices have owners when there are several ranks.

    Alone, with work="alone", or replicating plain parameters, `_exchange` is None and nothing here
    does anything.
    """

    _found: tuple[Exchange | None] | None  # None: not looked for yet
    _compared: bool
    _owners: dict[Tensor, int]
    _collected: dict[int, dict[Tensor, Statistics]]
    _shared: bool
    _under_way: list[tuple[Sequence[Matrix], Swap]]
    _spec_of: Callable[[Tensor, Group], LayerSpec]

    def _forget_ranks(self) -> None:
        self._found = None
        self._compared = False
        self._owners = {}
        self._collected = {}
        self._shared = True
        self._under_way = []

    def _forget_messages(self) -> None:
        """Let go of what a step that failed had collected and had under way."""
        self._collected = {}
        self._under_way = []

    def _anywhere(self, here: bool) -> bool:
        exchange = self._exchange
        if exchange is None:
            return here
        return any(there for (there,) in exchange.ranks.agree(None, float(here)))

    def _forget_comparison(self) -> None:
        self._compared = False

    @property
    def _exchange(self) -> Exchange | None:
        """The messages between ranks; looked for at first use, when process groups exist."""
        if self._found is None:
            if not is_distributed():
                return None
            self._found = (self._new_exchange(),)
        return self._found[0]

    def _new_exchange(self) -> Exchange | None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        sharded = next((p for p in parameters if is_sharded(p)), None)
        work = self.defaults["work"]
        if work == "alone" and sharded is None:
            return None
        ranks = Ranks(self._process_group, local(parameters[0]).device)
        if sharded is None:
            return Exchange(ranks) if work == "shared" and ranks.size > 1 else None
        if work != "shared":
            raise ValueError(
                f"work={work!r} needs whole parameters on each rank, but these are sharded; use "
                'work="shared"'
            )
        mesh: Any = sharded.device_mesh
        if mesh.size() != ranks.size:
            raise ValueError(
                f"parameters are sharded over {mesh.size()} ranks, but the process group has "
                f"{ranks.size}; pass process_group=, the group of just those ranks"
            )
        return Exchange(ranks)

    # ---- before anything changes ---------------------------------------------------------------

    def _look(self) -> tuple[str | None, list[float]]:
        """A fault in this rank's gradients, and numbers in which ranks must not differ."""
        exchange = self._exchange
        if exchange is None:
            return self._fault(), []
        present = [
            [parameter.grad is not None for parameter in group["params"]]
            for group in self.param_groups
        ]
        self._collected = {
            index: self._local_statistics(index, exchange.ranks.size)
            for index, capture in enumerate(self._captures)
            if capture.window.open
        }
        sharing = [
            first_reader(seen, self.param_groups[index]["params"])
            for index, seen in self._collected.items()
        ]
        return self._fault(), [checksum(present), checksum(sharing)]

    def _agreed_fault(self) -> str | None:
        """What is wrong with the gradients, of this rank or another; the same on all of them."""
        exchange = self._exchange
        if exchange is None:
            return self._fault()
        failure: Exception | None = None
        fault, numbers = None, [0.0, 0.0]
        try:
            self._compare_once(exchange.ranks)
            fault, numbers = self._look()
        except RankError:
            raise
        except Exception as raised:
            failure = raised
        table = exchange.ranks.agree(failure, fault is not None, *numbers)
        if len({row[1] for row in table}) > 1:
            raise RankError(
                "ranks differ in which parameters have a gradient; every rank must train the same "
                "layers (DistributedDataParallel needs find_unused_parameters=True for that)"
            )
        self._shared = len({row[2] for row in table}) == 1
        faulty = [rank for rank, row in enumerate(table) if row[0]]
        if not faulty:
            return None
        return f"on rank {faulty[0]}, {exchange.ranks.objects(fault)[faulty[0]]}"

    def _compare_once(self, ranks: Ranks) -> None:
        """Tell of different settings or models before they do harm; at the first step only."""
        if self._compared:
            return
        mine = description(self.recipe.name, self.param_groups)
        if (difference := first_difference(mine, ranks.objects(mine), ranks.rank)) is not None:
            raise RankError(difference)
        self._compared = True

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
        capture, exchange = self._captures[index], self._exchange
        if not capture.window.open:
            return {}
        if exchange is not None:
            seen = self._collected.pop(index)
            return exchange.gather_moments(matrices, seen, capture.shapes(), shared=self._shared)
        replicas = self._replicas()
        seen = self._local_statistics(index, 1 if replicas is None else replicas.size)
        return seen if replicas is None else over_ranks(seen, capture.shapes(), replicas.group)

    def _replicas(self) -> Ranks | None:
        """Ranks that all do the same work, if there are several."""
        if self.defaults["work"] != "replicated" or not is_distributed():
            return None
        parameter = self.param_groups[0]["params"][0]
        ranks = Ranks(self._process_group, parameter.device)
        return ranks if ranks.size > 1 else None

    @contextmanager
    def _together(self, matrices: Sequence[Matrix]) -> Iterator[None]:
        """Work that ends with all ranks knowing whether it went well everywhere."""
        exchange = self._exchange
        if exchange is None or not matrices:
            yield
            return
        failure: Exception | None = None
        try:
            with naming([matrix.layer for matrix in matrices if matrix.layer is not None]):
                yield
        except RankError:
            raise
        except Exception as raised:
            failure = raised
        exchange.ranks.agree(failure)
        for matrix in matrices:
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

    @abstractmethod
    def _fault(self) -> str | None:
        """What is wrong with this rank's gradients."""

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

    def _settle(self) -> None:
        """Let go of what other ranks own; tell of what should have come and did not."""
        exchange = self._exchange
        owners = {} if exchange is None else self._choose_owners(exchange.ranks.size)
        rank = 0 if exchange is None else exchange.ranks.rank
        lacking = settled(self.state, self.param_groups, owners, rank)
        if lacking:
            warnings.warn(
                f"the checkpoint lacks the state of {lacking[0]!r} and {len(lacking) - 1} more, "
                "which begin anew: it looks like one rank's part. Save with "
                "consolidated_state_dict() or torch.distributed.checkpoint",
                GeometryWarning,
                stacklevel=3,
            )


def local_gradients(groups: Sequence[Group]) -> Iterator[tuple[str, Tensor | None]]:
    """Names and what this rank holds of their gradients."""
    for index, group in enumerate(groups):
        for name, parameter in named(group, index):
            yield name, local_gradient(parameter)
