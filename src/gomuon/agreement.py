"""What must be alike on all ranks, as plain values."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from gomuon.capture import Statistics
from gomuon.groups import named

Group = Mapping[str, Any]


def first_reader(seen: Mapping[Tensor, Statistics], parameters: Sequence[Tensor]) -> list[int]:
    """For every parameter the first one with the same inputs."""
    first: dict[int, int] = {}
    found = []
    for index, parameter in enumerate(parameters):
        inputs = seen[parameter].inputs if parameter in seen else None
        found.append(index if inputs is None else first.setdefault(id(inputs), index))
    return found


def description(method: str, groups: Sequence[Group]) -> dict[str, Any]:
    """The method, its settings, and the parameters."""
    described: dict[str, Any] = {"the method": method}
    for index, group in enumerate(groups):
        for key, value in group.items():
            if key not in ("params", "param_names"):
                plain = value.tolist() if isinstance(value, Tensor) else value
                described[f"{key} of group {index}"] = plain
        for name, parameter in named(group, index):
            described[f"parameter {name!r}"] = (tuple(parameter.shape), str(parameter.dtype))
    return described


def first_difference(mine: Mapping[str, Any], everyone: Sequence[object], rank: int) -> str | None:
    """In what this rank and another differ; every rank finds something when any two do."""
    for other, theirs in enumerate(everyone):
        assert isinstance(theirs, dict)
        for key in (*mine, *theirs):
            if mine.get(key) != theirs.get(key):
                return (
                    f"ranks differ in {key}: rank {rank} has {mine.get(key)!r}, rank {other} has "
                    f"{theirs.get(key)!r}; make the model and the optimizer alike"
                )
    return None
