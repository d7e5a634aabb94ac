"""Checks before each step that all ranks agree: settings, weights and gradients."""

import math
from collections.abc import Collection, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from gomuon.distributed.own_parameters import (
    check_companions,
    first_on_two_ranks,
    numbers_of,
    shared_groups,
)
from gomuon.distributed.ranks import Ranks, checksum
from gomuon.distributed.team import Captured, LocalCheck
from gomuon.errors import RankError
from gomuon.intervals import as_plain
from gomuon.moments import Statistics
from gomuon.parameters.groups import named
from gomuon.parameters.sharding import is_sharded

Group = Mapping[str, Any]

_OWN = "own parameters"  # a key beside those of `description`
FIRST = -1.0  # instead of a checksum: this rank has not compared settings yet

# Tensors count as different if they differ by more than this fraction of their norm. Averages
# summed in another order differ by 1e-6 in float32, gradients of two batches by 0.1 or more, and so
# do the weights of two models.
DIFFERENT_ABOVE = 1e-3
ROUNDINGS = 4  # for a coarser dtype, this many times its precision


class Agreement:
    """Compares all ranks before each step.

    Args:
        ranks: the ranks to compare.
        own: parameters that only this rank has. They are not compared.

    Attributes:
        compared: whether settings, weights and gradients have been compared.
        inputs_agree: whether all ranks agree on which layers read the same inputs.
    """

    def __init__(self, ranks: Ranks, own: Collection[Tensor] = ()) -> None:
        self.ranks = ranks
        self._own = own
        self.compared = False
        self.inputs_agree = True

    def before_step(
        self, check: LocalCheck, method: str, groups: Sequence[Group]
    ) -> tuple[str | None, Captured]:
        """A fault in any rank's gradients (the same answer on all ranks), and own statistics.

        Raises:
            RankError: ranks differ in something that must be equal, or a rank failed. All ranks
                raise.
        """
        ranks = self.ranks
        failure: Exception | None = None
        fault: str | None = None
        captured: Captured = {}
        numbers = [0.0, 0.0, 0.0]
        every = groups
        try:
            fault, captured = check()
            if self._own:
                groups = shared_groups(every, self._own)
                check_companions(every, self._own)
            numbers = self._numbers(captured, groups)
        except Exception as raised:
            failure = raised
        table = ranks.exchange_status(failure, fault is not None, *numbers)
        present, sharing, settings = ([row[place] for row in table] for place in (1, 2, 3))
        first = FIRST in settings
        if first or len(set(settings)) > 1:
            mine = description(method, groups)
            own = {_OWN: numbers_of(every, self._own)} if first and self._own else {}
            everyone = [_as_dict(one) for one in ranks.gather_objects({**mine, **own})]
            of_ranks = [theirs.pop(_OWN, {}) for theirs in everyone]
            if (difference := first_difference(mine, everyone, ranks.rank)) is not None:
                raise RankError(difference)
            if (difference := first_on_two_ranks(of_ranks)) is not None:
                raise RankError(difference)
        if len(set(present)) > 1:
            names = [name for index, group in enumerate(groups) for name, _ in named(group, index)]
            missing = missing_gradient(names, ranks.gather_objects(_has_gradient(groups)))
            raise RankError(
                f"ranks differ in which parameters have a gradient: {missing}. Train the same "
                "layers on every rank (with DistributedDataParallel, pass "
                'find_unused_parameters=True), or pass work="alone" if every rank trains its own '
                "model. Nothing was changed"
            )
        self.inputs_agree = len(set(sharing)) == 1
        faulty = [rank for rank, row in enumerate(table) if row[0]]
        if faulty:
            return f"on rank {faulty[0]}, {ranks.gather_objects(fault)[faulty[0]]}", captured
        if first:
            self._compare_tensors(groups)
            self.compared = True
        return None, captured

    def _numbers(self, captured: Captured, groups: Sequence[Group]) -> list[float]:
        """Checksums of gradients present, shared inputs and settings."""
        sharing = [first_reader(seen, groups[index]["params"]) for index, seen in captured.items()]
        settings = settings_of(groups, wait=False) if self.compared else None
        return [
            checksum(_has_gradient(groups)),
            checksum(sharing),
            FIRST if settings is None else checksum(settings),
        ]

    def _compare_tensors(self, groups: Sequence[Group]) -> None:
        """Raise a RankError if weights or gradients differ. First step only: it costs a message.

        An owner computes its step from its own rank's gradient, and all ranks apply this step to
        their own weights. So ranks with other weights or gradients would be mixed.
        """
        whole = [
            (name, parameter)
            for index, group in enumerate(groups)
            for name, parameter in named(group, index)
            if parameter.numel() and not is_sharded(parameter)
        ]
        if not whole:
            return
        names = [f"the weight of {name!r}" for name, _ in whole]
        tensors = [parameter.detach() for _, parameter in whole]
        allowed = [DIFFERENT_ABOVE] * len(whole)  # replicas are equal in any dtype
        for name, parameter in whole:
            if parameter.grad is not None:
                names.append(f"the gradient of {name!r}")
                tensors.append(parameter.grad)
                allowed.append(rounding_allowed(parameter.grad.dtype))
        table = self.ranks.gather(norms_and_sums(tensors, self.ranks.device))
        if difference := first_differing_tensor(names, allowed, table):
            raise RankError(
                f"{difference}. Ranks that work together need equal weights and equal gradients: "
                "wrap the model in DistributedDataParallel, or start from equal weights and "
                'average gradients before the step, or pass work="alone" if every rank trains its '
                'own model. Of a parameter that only one rank has say LayerSpec(ranks="own"). '
                "Nothing was changed"
            )


def _as_dict(received: object) -> dict[str, Any]:
    assert isinstance(received, dict)
    return received


def _has_gradient(groups: Sequence[Group]) -> list[bool]:
    return [p.grad is not None for group in groups for p in group["params"]]


def first_reader(seen: Mapping[Tensor, Statistics], parameters: Sequence[Tensor]) -> list[int]:
    """For every parameter, the index of the first parameter with the same inputs."""
    first: dict[int, int] = {}
    found = []
    for index, parameter in enumerate(parameters):
        inputs = seen[parameter].inputs if parameter in seen else None
        found.append(index if inputs is None else first.setdefault(id(inputs), index))
    return found


# ---- settings and models -------------------------------------------------------------------------


def settings_of(groups: Sequence[Group], *, wait: bool) -> dict[str, Any]:
    """All settings of the groups, as values that can be compared between ranks.

    Args:
        groups: an optimizer's parameter groups.
        wait: also read tensors on an accelerator, which makes the CPU wait for it.
    """
    return {
        f"{key} of group {index}": _comparable(value, wait)
        for index, group in enumerate(groups)
        for key, value in group.items()
        if key not in ("params", "param_names")
    }


def description(method: str, groups: Sequence[Group]) -> dict[str, Any]:
    """The method, its settings, and the shapes and dtypes of its parameters."""
    parameters = {
        f"parameter {name!r}": (tuple(parameter.shape), str(parameter.dtype))
        for index, group in enumerate(groups)
        for name, parameter in named(group, index)
    }
    return {"the method": method, **settings_of(groups, wait=True), **parameters}


def first_difference(mine: Mapping[str, Any], everyone: Sequence[object], rank: int) -> str | None:
    """The first difference to another rank. If any two ranks differ, every rank finds one."""
    for other, theirs in enumerate(everyone):
        assert isinstance(theirs, dict)
        for key in (*mine, *theirs):
            # Compared as text, so that NaN equals NaN.
            here, there = repr(mine.get(key)), repr(theirs.get(key))
            if here != there:
                return (
                    f"ranks differ in {key}: rank {rank} has {here}, rank {other} has {there}; "
                    "use the same model and settings on all ranks, and change settings on all of "
                    'them (of parameters that only one rank has say LayerSpec(ranks="own"))'
                )
    return None


def _comparable(value: Any, wait: bool) -> Any:
    """A form of the value that is equal on all ranks if the value is."""
    if isinstance(value, Tensor):
        return value.tolist() if wait or value.device.type == "cpu" else str(value.device.type)
    value = as_plain(value)
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)  # NumPy numbers have another repr
    if isinstance(value, (tuple, list)):
        return tuple(_comparable(item, wait) for item in value)
    if isinstance(value, Mapping):
        return {str(key): _comparable(item, wait) for key, item in value.items()}
    return type(value).__name__  # the repr of an object contains its address


# ---- weights and gradients -----------------------------------------------------------------------


def missing_gradient(names: Sequence[str], everyone: Sequence[object]) -> str:
    """The first parameter that has a gradient on one rank and none on another.

    `everyone` says for each rank which parameters have a gradient.
    """
    for index, name in enumerate(names):
        has = [bool(present[index]) for present in everyone if isinstance(present, list)]
        if len(set(has)) > 1:
            return f"{name!r} has one on rank {has.index(True)} and none on rank {has.index(False)}"
    return "none differs any more"


def norms_and_sums(tensors: Sequence[Tensor], device: torch.device) -> list[float]:
    """Norm and sum of each tensor, read from an accelerator in one go."""
    numbers = []
    for tensor in tensors:
        wide = torch.promote_types(tensor.dtype, torch.float32)
        norm = torch.linalg.vector_norm(tensor, dtype=wide)
        numbers += [norm.to(device).double(), tensor.sum(dtype=wide).to(device).double()]
    found: list[float] = torch.stack(numbers).tolist() if numbers else []
    return found


def rounding_allowed(dtype: torch.dtype) -> float:
    """The fraction of its norm by which a gradient of this dtype may differ between ranks."""
    return max(DIFFERENT_ABOVE, ROUNDINGS * torch.finfo(dtype).eps)


def first_differing_tensor(
    names: Sequence[str], allowed: Sequence[float], table: Sequence[Sequence[float]]
) -> str | None:
    """The first tensor that differs between ranks. Another check deals with NaN and infinity.

    Args:
        names: what each tensor is, for the message.
        allowed: the fraction of its norm by which each tensor may differ.
        table: for each rank, the norm and the sum of each tensor.
    """
    for index, (name, fraction) in enumerate(zip(names, allowed, strict=True)):
        norms, sums = ([row[2 * index + part] for row in table] for part in (0, 1))
        if not all(map(math.isfinite, [*norms, *sums])):
            continue
        for what, values in (("norm", norms), ("sum", sums)):
            least, most = min(values), max(values)
            if most - least > fraction * max(norms):
                one, other = sorted((values.index(least), values.index(most)))
                return (
                    f"{name} is not the same on all ranks: its {what} is {values[one]:.4g} on rank "
                    f"{one} and {values[other]:.4g} on rank {other}"
                )
    return None
