"""Loading optimizer state: older formats, other orders, full precision, and refusing the rest."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gomuon.holdings import is_sharded, placed
from gomuon.routing import plain_name
from gomuon.settings import CHECKS

FORMAT = 1
_SHARDED = ("exp_avg", "exp_avg_sq")  # lie as their parameter does; all else is its owner's
Checkpoint = dict[str, Any]
# From a format to the next one; a function may change the dict it is given, not what is in it.
MIGRATIONS: dict[int, Callable[[Checkpoint], Checkpoint]] = {}

Group = Mapping[str, Any]
_ELEMENTWISE = ("momentum", "square", "exp_avg", "exp_avg_sq")
_SIDES = {
    f"{side}_{kind}": place
    for place, side in enumerate(("left", "right"))
    for kind in ("factor", "map", "basis")
}


@dataclass(frozen=True)
class Shapes:
    """What the state of a parameter may look like.

    Attributes:
        memories: the shapes an elementwise memory may have.
        matrix: both sides of the matrices it is cut into; None if that is not known.
    """

    memories: frozenset[tuple[int, ...]]
    matrix: tuple[int, int] | None


ShapesOf = Callable[[Tensor, Group], Shapes]


def fitted(
    groups: Sequence[Group], state_dict: Mapping[str, Any], method: str, shapes: ShapesOf
) -> Checkpoint:
    """The checkpoint as these groups can load it: today's format, their settings, their order.

    Parameters are matched by name where both sides have names, else by position as torch does.

    Args:
        groups: the optimizer's.
        state_dict: stays as it is.
        method: the recipe's name.
        shapes: what the state of a parameter may look like.

    Raises:
        ValueError: it does not fit; the message names the first reason.
    """
    checkpoint = migrated(state_dict)
    saved_groups = checkpoint["param_groups"]
    _check_method(groups, checkpoint, method)
    if len(saved_groups) != len(groups):
        raise ValueError(
            f"the checkpoint has {len(saved_groups)} parameter groups, the optimizer {len(groups)}"
        )
    checkpoint["param_groups"] = [
        {**_missing_settings(group, saved), **_in_order(index, group, saved)}
        for index, (group, saved) in enumerate(zip(groups, saved_groups, strict=True))
    ]
    _check_shapes(groups, checkpoint, shapes)
    return checkpoint


def migrated(state_dict: Mapping[str, Any]) -> Checkpoint:
    """A shallow copy in today's format; without a number it is format 1."""
    checkpoint = dict(state_dict)
    version = checkpoint.get("format", 1)
    if not isinstance(version, int) or not 1 <= version <= FORMAT:
        raise ValueError(
            f"this checkpoint has format {version!r}; this gomuon reads formats 1 to {FORMAT}: "
            "install a newer one"
        )
    for old in range(version, FORMAT):
        checkpoint = MIGRATIONS[old](checkpoint)
    return {**checkpoint, "format": FORMAT}


def _check_method(groups: Sequence[Group], checkpoint: Checkpoint, method: str) -> None:
    saved = checkpoint.get("method")
    if saved is not None:
        if saved != method:
            raise ValueError(f"this is a checkpoint of {saved}; it cannot go on with {method}")
        return
    # torch.distributed.checkpoint keeps state and groups only: a setting may still tell.
    for group, saved_group in zip(groups, checkpoint["param_groups"], strict=False):
        for name in saved_group:
            if name in CHECKS and name not in group:
                raise ValueError(
                    f"the checkpoint is of another method: {method} has no setting {name!r}"
                )


def _missing_settings(group: Group, saved: Group) -> dict[str, Any]:
    """Settings a checkpoint was written without, because they came later, keep their values."""
    return {
        name: value
        for name, value in group.items()
        if name not in saved and (name in CHECKS or name in ("adamw", "step"))
    }


def _in_order(index: int, group: Group, saved: Group) -> dict[str, Any]:
    """The saved group, its parameters in the order of the optimizer's."""
    own, ids = group.get("param_names"), saved["params"]
    # get_state_dict calls parameters by their names and leaves `param_names` in the saved order.
    called_by_name = bool(ids) and all(isinstance(name, str) for name in ids)
    names = ids if called_by_name else saved.get("param_names")
    if len(ids) != len(group["params"]):
        raise ValueError(
            f"group {index} of the checkpoint has {len(ids)} parameters, the optimizer's "
            f"{len(group['params'])}{_first_difference(own, names)}"
        )
    if own is None or names is None:
        return dict(saved)
    places = {name: place for place, name in enumerate(_unwrapped(names))}
    wanted = _unwrapped(own)
    if places.keys() == set(wanted) and len(places) == len(wanted):
        ids = [ids[places[name]] for name in wanted]
    elif not called_by_name:  # else torch has matched them, a tied one perhaps by its other name
        raise ValueError(
            f"group {index} of the checkpoint has other parameters than the optimizer's"
            f"{_first_difference(own, names)}"
        )
    return {**saved, "params": ids, "param_names": list(own)}


def _unwrapped(names: Sequence[str]) -> list[str]:
    """Names as they are without DistributedDataParallel and torch.compile around the model."""
    bare = [plain_name(name).removeprefix("module.") for name in names]
    return bare if len(set(bare)) == len(bare) else list(names)


def _first_difference(own: Sequence[str] | None, saved: Sequence[str] | None) -> str:
    if own is None or saved is None:
        return ""
    bare, saved_bare = _unwrapped(own), _unwrapped(saved)
    said = [
        f"{name!r} is only in the {where}"
        for where, here, there in (
            ("checkpoint", saved_bare, bare),
            ("optimizer", bare, saved_bare),
        )
        for name in [next((name for name in here if name not in there), None)]
        if name is not None
    ]
    return f": {', '.join(said)}" if said else ""


def _check_shapes(groups: Sequence[Group], checkpoint: Checkpoint, shapes: ShapesOf) -> None:
    for saved_id, parameter, name, saved in _pairs(groups, checkpoint["param_groups"]):
        entries = checkpoint["state"].get(saved_id, {})
        # Memories first: they tell of another parameter, the rest of another cut.
        for key, value in sorted(entries.items(), key=lambda e: e[0] not in _ELEMENTWISE):
            if not isinstance(value, Tensor):
                continue
            allowed = shapes(parameter, saved)  # whose settings are loaded too
            if key in _ELEMENTWISE and tuple(value.shape) not in allowed.memories:
                raise ValueError(
                    f"{key} of {name!r} has shape {tuple(value.shape)} in the checkpoint, the "
                    f"parameter has {tuple(parameter.shape)}"
                )
            if key not in _SIDES or allowed.matrix is None:
                continue
            side = allowed.matrix[_SIDES[key]]
            square = value.ndim > 1 and value.shape[-1] == value.shape[-2]  # some are diagonals
            if square and value.shape[-1] != side:
                raise ValueError(
                    f"{key} of {name!r} is for matrices with a side of {value.shape[-1]} in the "
                    f"checkpoint, here that side has {side}; was it saved with other specs, or "
                    "with another block_size?"
                )


def is_blank(entries: Mapping[str, Any]) -> bool:
    """Whether a parameter's state only has the shapes of one, see `persistence`."""
    return entries.get("updates") == 0


def restored_state(
    groups: Sequence[Group], state_dict: Mapping[str, Any]
) -> dict[Tensor, dict[str, Any]]:
    """The saved state on each parameter's device, in the dtypes it was saved in.

    torch's own loading rounds float32 state of bfloat16 parameters to bfloat16. Tensors that were
    one tensor when saved (a map shared by q, k and v) are one again.
    """
    copies: dict[tuple[int, torch.device], Tensor] = {}
    state = state_dict["state"]

    def restore(key: str, value: Any, parameter: Tensor) -> Any:
        if not isinstance(value, Tensor):
            return value
        # torch's AdamW counts on the host.
        device = value.device if key == "step" else parameter.device
        where = (id(value), device)
        if where not in copies:
            copies[where] = value.detach().to(device, copy=True)
        if key in _SHARDED and is_sharded(parameter) and not is_sharded(value):
            return placed(copies[where], parameter)
        return copies[where]

    return {
        parameter: {
            key: restore(key, value, parameter)
            for key, value in state[saved_id].items()
            if not isinstance(value, dict)  # torch's stand-in for what a flat checkpoint lacks
        }
        for saved_id, parameter, *_ in _pairs(groups, state_dict["param_groups"])
        if state.get(saved_id) and not is_blank(state[saved_id])
    }


def _pairs(
    groups: Sequence[Group], saved_groups: Sequence[Group]
) -> list[tuple[int | str, Tensor, str, Group]]:
    return [
        (saved_id, parameter, parameter_name(group, index, position), saved)
        for index, (group, saved) in enumerate(zip(groups, saved_groups, strict=True))
        for position, (saved_id, parameter) in enumerate(
            zip(saved["params"], group["params"], strict=True)
        )
    ]


def parameter_name(group: Group, index: int, position: int) -> str:
    """The name the user gave, or the parameter's place among the groups."""
    names = group.get("param_names")
    return names[position] if names else f"group {index}, parameter {position}"
