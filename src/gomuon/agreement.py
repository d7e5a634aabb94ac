"""What must be alike on all ranks, as plain values."""

import math
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from gomuon.capture import Statistics
from gomuon.groups import named

Group = Mapping[str, Any]

# Two ranks' gradients are told apart by this part of their length. Averages made in another order
# differ by a millionth in float32, gradients of two batches or two models by a tenth and more.
UNLIKE = 1e-3
ROUNDINGS = 4  # as many of a coarser dtype's


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
