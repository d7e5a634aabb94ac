"""What all ranks must have in common, compared before anything changes."""

import math
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from gomuon.distributed.ranks import Ranks, checksum
from gomuon.distributed.team import Captured, Look
from gomuon.errors import RankError
from gomuon.moments import Statistics
from gomuon.parameters.groups import named
from gomuon.parameters.sharding import is_sharded

Group = Mapping[str, Any]

FIRST = -1.0  # instead of a checksum: this rank has not compared anything yet

# Gradients that differ by more than this part of their length count as different. Averages made in
# another order differ by a millionth in float32, gradients of two batches by a tenth and more.
UNLIKE = 1e-3
ROUNDINGS = 4  # for a coarser dtype, this many of its roundings


class Agreement:
    """The agreement of all ranks before each step.

    Attributes:
        compared: whether settings, parameters and gradients have been compared.
        inputs_agree: whether all ranks agree on which layers read the same inputs.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.compared = False
        self.inputs_agree = True

    def reach(
        self, look: Look, method: str, groups: Sequence[Group]
    ) -> tuple[str | None, Captured]:
        """A fault in any rank's gradients, the same on all ranks, and this rank's statistics.

        Raises:
            RankError: ranks differ in what must be the same, or one of them failed; on all of them.
        """
        ranks = self.ranks
        failure: Exception | None = None
        fault: str | None = None
        captured: Captured = {}
        numbers = [0.0, 0.0, 0.0]
        try:
            fault, captured = look()
            numbers = self._numbers(captured, groups)
        except Exception as raised:
            failure = raised
        table = ranks.agree(failure, fault is not None, *numbers)
        present, sharing, settings = ([row[place] for row in table] for place in (1, 2, 3))
        first = FIRST in settings
        if first or len(set(settings)) > 1:
            mine = description(method, groups)
            if (difference := first_difference(mine, ranks.objects(mine), ranks.rank)) is not None:
                raise RankError(difference)
        if len(set(present)) > 1:
            names = [name for index, group in enumerate(groups) for name, _ in named(group, index)]
            missing = missing_gradient(names, ranks.objects(_present(groups)))
            raise RankError(
                f"ranks differ in which parameters have a gradient: {missing}. Every rank must "
                "train the same layers (DistributedDataParallel needs find_unused_parameters=True "
                "for that)"
            )
        self.inputs_agree = len(set(sharing)) == 1
        faulty = [rank for rank, row in enumerate(table) if row[0]]
        if faulty:
            return f"on rank {faulty[0]}, {ranks.objects(fault)[faulty[0]]}", captured
        if first:
            self._compare_gradients(groups)
            self.compared = True
        return None, captured

    def _numbers(self, captured: Captured, groups: Sequence[Group]) -> list[float]:
        """Checksums in which ranks must not differ."""
        sharing = [first_reader(seen, groups[index]["params"]) for index, seen in captured.items()]
        settings = settings_of(groups, wait=False) if self.compared else None
        return [
            checksum(_present(groups)),
            checksum(sharing),
            FIRST if settings is None else checksum(settings),
        ]

    def _compare_gradients(self, groups: Sequence[Group]) -> None:
        """Refuse gradients that were not averaged; only at the first step, for it costs a message.

        An owner's step is made of its own rank's gradients and moves every rank's weights.
        """
        whole = [
            (name, parameter.grad)
            for index, group in enumerate(groups)
            for name, parameter in named(group, index)
            if parameter.grad is not None and parameter.numel() and not is_sharded(parameter)
        ]
        if not whole:
            return
        names, gradients = [name for name, _ in whole], [gradient for _, gradient in whole]
        table = self.ranks.gather(lengths_and_sums(gradients, self.ranks.device))
        if unlike := unlike_gradients(names, [g.dtype for g in gradients], table):
            raise RankError(
                f"{unlike}. Ranks that work together need the same gradients: wrap the model in "
                "DistributedDataParallel or average them before the step, or pass "
                'work="alone" if every rank trains a model of its own. Nothing was changed'
            )


def _present(groups: Sequence[Group]) -> list[bool]:
    return [p.grad is not None for group in groups for p in group["params"]]


def first_reader(seen: Mapping[Tensor, Statistics], parameters: Sequence[Tensor]) -> list[int]:
    """For every parameter the first one with the same inputs."""
    first: dict[int, int] = {}
    found = []
    for index, parameter in enumerate(parameters):
        inputs = seen[parameter].inputs if parameter in seen else None
        found.append(index if inputs is None else first.setdefault(id(inputs), index))
    return found


# ---- settings and models -------------------------------------------------------------------------


def settings_of(groups: Sequence[Group], *, wait: bool) -> dict[str, Any]:
    """Everything in the groups but their parameters, as plain values.

    Args:
        groups: an optimizer's.
        wait: read tensors on an accelerator too, for which the host has to wait.
    """
    return {
        f"{key} of group {index}": _plain(value, wait)
        for index, group in enumerate(groups)
        for key, value in group.items()
        if key not in ("params", "param_names")
    }


def description(method: str, groups: Sequence[Group]) -> dict[str, Any]:
    """The method, its settings, and the parameters."""
    parameters = {
        f"parameter {name!r}": (tuple(parameter.shape), str(parameter.dtype))
        for index, group in enumerate(groups)
        for name, parameter in named(group, index)
    }
    return {"the method": method, **settings_of(groups, wait=True), **parameters}


def first_difference(mine: Mapping[str, Any], everyone: Sequence[object], rank: int) -> str | None:
    """In what this rank and another differ; every rank finds something when any two do."""
    for other, theirs in enumerate(everyone):
        assert isinstance(theirs, dict)
        for key in (*mine, *theirs):
            here, there = repr(mine.get(key)), repr(theirs.get(key))  # so that NaN equals NaN
            if here != there:
                return (
                    f"ranks differ in {key}: rank {rank} has {here}, rank {other} has {there}; "
                    "make the model and the optimizer alike, and change settings on all ranks"
                )
    return None


def _plain(value: Any, wait: bool) -> Any:
    """A value that is the same on every rank where it means the same."""
    if isinstance(value, Tensor):
        return value.tolist() if wait or value.device.type == "cpu" else str(value.device.type)
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)  # NumPy's are shown differently
    if isinstance(value, (tuple, list)):
        return tuple(_plain(item, wait) for item in value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item, wait) for key, item in value.items()}
    return type(value).__name__  # an object is shown with its address


# ---- gradients -----------------------------------------------------------------------------------


def missing_gradient(names: Sequence[str], everyone: Sequence[object]) -> str:
    """Which parameter has a gradient on one rank and none on another, given who has which."""
    for index, name in enumerate(names):
        has = [bool(present[index]) for present in everyone if isinstance(present, list)]
        if len(set(has)) > 1:
            return f"{name!r} has one on rank {has.index(True)} and none on rank {has.index(False)}"
    return "none differs now"


def lengths_and_sums(gradients: Sequence[Tensor], device: torch.device) -> list[float]:
    """Two numbers of each gradient; read from an accelerator at once."""
    numbers = []
    for gradient in gradients:
        wide = torch.promote_types(gradient.dtype, torch.float32)
        length = torch.linalg.vector_norm(gradient, dtype=wide)
        numbers += [length.to(device).double(), gradient.sum(dtype=wide).to(device).double()]
    found: list[float] = torch.stack(numbers).tolist() if numbers else []
    return found


def unlike_gradients(
    names: Sequence[str], dtypes: Sequence[torch.dtype], table: Sequence[Sequence[float]]
) -> str | None:
    """The first gradient that is not the same on all ranks, given everybody's lengths and sums.

    NaN and infinity are another check's.
    """
    for index, (name, dtype) in enumerate(zip(names, dtypes, strict=True)):
        lengths, sums = ([row[2 * index + part] for row in table] for part in (0, 1))
        if not all(map(math.isfinite, [*lengths, *sums])):
            continue
        allowed = max(UNLIKE, ROUNDINGS * torch.finfo(dtype).eps) * max(lengths)
        for what, values in (("length", lengths), ("sum", sums)):
            least, most = min(values), max(values)
            if most - least > allowed:
                one, other = sorted((values.index(least), values.index(most)))
                return (
                    f"the gradient of {name!r} is not the same on all ranks: its {what} is "
                    f"{values[one]:.4g} on rank {one} and {values[other]:.4g} on rank {other}"
                )
    return None
