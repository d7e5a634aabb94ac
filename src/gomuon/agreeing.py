"""With whom an optimizer works, and agreement among them before anything changes."""

import weakref
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, Self

import torch.distributed as dist
from torch import Tensor, nn

from gomuon.agreement import (
    description,
    first_difference,
    first_reader,
    lengths_and_sums,
    missing_gradient,
    settings_of,
    unlike_gradients,
)
from gomuon.capture import Statistics
from gomuon.errors import RankError
from gomuon.exchange import Exchange
from gomuon.groups import named
from gomuon.holdings import is_sharded, local
from gomuon.ranks import Ranks, checksum, is_distributed
from gomuon.watching import WatchingOptimizer
from gomuon.wrapping import Wrapping


@dataclass(frozen=True, eq=False)
class Company:
    """Who works with this process.

    Attributes:
        ranks: they agree before every message; None when this process is alone.
        exchange: how their messages travel where every matrix has an owner; None where everyone
            does everything.
    """

    ranks: Ranks | None = None
    exchange: Exchange | None = None


ALONE = Company()
UNTIL_WRAPPED = Company()  # alone, unless the model is seen inside a wrapper later
FIRST = -1.0  # in the place of a checksum: this rank has not compared anything yet


class AgreeingOptimizer(WatchingOptimizer):
    """An optimizer that knows its company and does nothing that they do not do as well."""

    _found: Company | None  # None: not looked for yet
    _wrapping: Wrapping
    _compared: bool
    _collected: dict[int, dict[Tensor, Statistics]]
    _shared: bool
    _unsettled: bool  # a state was loaded while the company was not known yet
    _told: bool  # that ranks train alone

    def _forget_ranks(self) -> None:
        self._found = None
        self._wrapping = Wrapping()
        self._compared = False
        self._collected = {}
        self._shared = True
        self._unsettled = False
        self._told = False
        weakref.finalize(self, self._wrapping.remove)

    # ---- with whom -------------------------------------------------------------------------------

    @property
    def _company(self) -> Company:
        """Looked for at first use, when process groups exist; later only for a wrapper."""
        if self._found is None:
            if not is_distributed():
                return ALONE
            self._found = self._new_company()
        elif self._found is UNTIL_WRAPPED and self._wrapping.found:
            self._found = self._new_company()
            self._rolls.clear()
            self._settle()
        return self._found

    @property
    def _ranks(self) -> Ranks | None:
        return self._company.ranks

    @property
    def _exchange(self) -> Exchange | None:
        return self._company.exchange

    def _new_company(self) -> Company:
        parameters = [p for group in self.param_groups for p in group["params"]]
        sharded = next((p for p in parameters if is_sharded(p)), None)
        work = self.defaults["work"]
        if work == "auto":
            if sharded is None and not self._wrapping.found:
                return UNTIL_WRAPPED
            work = "shared"
        if work == "alone" and sharded is None:
            return ALONE
        ranks = Ranks(self._group_of_ranks, local(parameters[0]).device)
        if sharded is None:
            if ranks.size == 1:
                return ALONE
            return Company(ranks, Exchange(ranks) if work == "shared" else None)
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
        return Company(ranks, Exchange(ranks))

    @property
    def _group_of_ranks(self) -> dist.ProcessGroup | None:
        """As given, else the wrapper's; None is the default one."""
        return self._wrapping.group if self._process_group is None else self._process_group

    def attach(self, model: nn.Module) -> None:
        """Place the capturing hooks on `model`, whose parameters this optimizer holds.

        The constructor does so when it is given a model. Needed again after unpickling.
        """
        super().attach(model)
        # Alone, a method without statistics is right under a wrapper too, only with more work: so
        # where there are no ranks yet its model has no hook, and torch.jit.script can have it.
        if self._captures_statistics or is_distributed():
            self._wrapping.watch(model)

    @property
    def _captures_statistics(self) -> bool:
        sides = self.recipe.geometry.captured_sides
        return any(any(sides(group)) for group in self.param_groups)

    def remove_hooks(self) -> None:
        """Take every hook off the model; the geometry then stays as it is."""
        super().remove_hooks()
        self._wrapping.remove()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; the next step compares the ranks again."""
        super().add_param_group(param_group)
        self._compared = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        new = super().__deepcopy__(memo)
        new._wrapping.follow(self._wrapping)
        return new

    def _settle(self) -> None:
        self._unsettled = self._company is UNTIL_WRAPPED  # then the next step knows
        if not self._unsettled:
            self._let_go(self._exchange)

    def _anywhere(self, here: bool) -> bool:
        ranks = self._ranks
        return here if ranks is None else any(there for (there,) in ranks.agree(None, float(here)))

    def _forget_comparison(self) -> None:
        self._compared = False

    # ---- before anything changes -----------------------------------------------------------------

    def _agreed_fault(self) -> str | None:
        """What is wrong with the gradients, of this rank or another; the same on all of them.

        Raises:
            RankError: ranks differ in what must be alike, or one of them failed; on all of them.
        """
        company = self._company
        if company is UNTIL_WRAPPED:
            self._go_on_alone()
        if company.ranks is None:
            return self._fault()
        ranks = company.ranks
        failure: Exception | None = None
        fault, numbers = None, [0.0, 0.0, 0.0]
        try:
            fault, numbers = self._look(ranks)
        except Exception as raised:
            failure = raised
        table = ranks.agree(failure, fault is not None, *numbers)
        present, sharing, settings = ([row[place] for row in table] for place in (1, 2, 3))
        first = FIRST in settings
        if first or len(set(settings)) > 1:
            mine = description(self.recipe.name, self.param_groups)
            if (difference := first_difference(mine, ranks.objects(mine), ranks.rank)) is not None:
                raise RankError(difference)
        if len(set(present)) > 1:
            raise RankError(
                f"ranks differ in which parameters have a gradient: {self._missing(ranks)}. Every "
                "rank must train the same layers (DistributedDataParallel needs "
                "find_unused_parameters=True for that)"
            )
        self._shared = len(set(sharing)) == 1
        faulty = [rank for rank, row in enumerate(table) if row[0]]
        if faulty:
            return f"on rank {faulty[0]}, {ranks.objects(fault)[faulty[0]]}"
        if first:
            self._compare_gradients(ranks)
            self._compared = True
        return None

    def _look(self, ranks: Ranks) -> tuple[str | None, list[float]]:
        """A fault in this rank's gradients, and numbers in which ranks must not differ."""
        self._collected = {
            index: self._local_statistics(index, ranks.size)
            for index, capture in enumerate(self._captures)
            if capture.window.open
        }
        sharing = [
            first_reader(seen, self.param_groups[index]["params"])
            for index, seen in self._collected.items()
        ]
        settings = settings_of(self.param_groups, wait=False) if self._compared else None
        return self._fault(), [
            checksum(self._present()),
            checksum(sharing),
            FIRST if settings is None else checksum(settings),
        ]

    def _present(self) -> list[bool]:
        return [p.grad is not None for group in self.param_groups for p in group["params"]]

    def _missing(self, ranks: Ranks) -> str:
        names = [n for index, group in enumerate(self.param_groups) for n, _ in named(group, index)]
        return missing_gradient(names, ranks.objects(self._present()))

    def _compare_gradients(self, ranks: Ranks) -> None:
        """Tell of gradients that nobody has averaged; at the first step, for it costs a message.

        An owner's step is made of its own rank's gradients and moves every rank's weights.
        """
        whole = [
            (name, parameter.grad)
            for index, group in enumerate(self.param_groups)
            for name, parameter in named(group, index)
            if parameter.grad is not None and parameter.numel() and not is_sharded(parameter)
        ]
        if not whole:
            return
        names, gradients = [name for name, _ in whole], [gradient for _, gradient in whole]
        table = ranks.gather(lengths_and_sums(gradients, ranks.device))
        if unlike := unlike_gradients(names, [g.dtype for g in gradients], table):
            raise RankError(
                f"{unlike}. Ranks that work together need the same gradients: wrap the model in "
                "DistributedDataParallel or average them before the step, or pass "
                'work="alone" if every rank trains a model of its own. Nothing was changed'
            )

    def _go_on_alone(self) -> None:
        """Alone among several processes: settle what was loaded, and say so where it matters."""
        if self._unsettled:
            self._unsettled = False
            self._let_go(None)
        if self._told or self._model is None or dist.get_world_size(self._group_of_ranks) < 2:
            return
        # Without statistics steps made of equal gradients are equal: then nobody need know.
        if self._captures_statistics and any(float(group["lr"]) for group in self.param_groups):
            self._told = True
            self._warn_once(
                "there are several ranks, but the model was not seen inside "
                "DistributedDataParallel, so each trains alone, on statistics of its own. If they "
                "train one model, give the optimizer the wrapped model, or pass "
                'work="shared" if you average gradients yourself; else pass work="alone"'
            )

    @abstractmethod
    def _let_go(self, exchange: Exchange | None) -> None:
        """Make a state that was loaded fit this rank."""

    @abstractmethod
    def _fault(self) -> str | None:
        """What is wrong with this rank's gradients."""

    @abstractmethod
    def _warn_once(self, message: str) -> None:
        """Warn, unless it was said before."""
