"""Loading optimizer state: older formats, other orders, full precision, and refusing the rest."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gomuon.entries import (
    Cut,
    Place,
    Side,
    check_numbers,
    check_together,
    checked,
    entries_of,
)
from gomuon.functional.checks import shown
from gomuon.groups import parameter_name
from gomuon.holdings import is_sharded, placed
from gomuon.recipes import Recipe
from gomuon.saved_groups import check_method, check_structure, fitted_group

FORMAT = 1
_SHARDED = ("exp_avg", "exp_avg_sq")  # lie as their parameter does; all else is its owner's
Checkpoint = dict[str, Any]
# From a format to the next one; a function may change the dict it is given, not what is in it.
MIGRATIONS: dict[int, Callable[[Checkpoint], Checkpoint]] = {}

Group = Mapping[str, Any]
CutOf = Callable[[Tensor, Group], Cut]


def fitted(groups: Sequence[Group], state_dict: Any, recipe: Recipe, cut_of: CutOf) -> Checkpoint:
    """The checkpoint as these groups can load it: today's format, their settings, their order.

    Parameters are matched by name where both sides have names, else by position as torch does.
    Everything is checked here, before anything is replaced.

    Args:
        groups: the optimizer's.
        state_dict: anything; it stays as it is.
        recipe: the method's.
        cut_of: how a parameter is cut into matrices in a group with given settings.

    Raises:
        ValueError: it does not fit; the message names the first reason.
    """
    checkpoint = migrated(state_dict)
    check_structure(checkpoint)
    saved_groups = checkpoint["param_groups"]
    check_method(groups, checkpoint, recipe.name)
    if len(saved_groups) != len(groups):
        raise ValueError(
            f"the checkpoint has {len(saved_groups)} parameter groups, the optimizer {len(groups)}"
        )
    fitting = [
        fitted_group(index, group, saved, recipe)
        for index, (group, saved) in enumerate(zip(groups, saved_groups, strict=True))
    ]
    checkpoint["param_groups"] = fitting
    checkpoint["state"] = {
        saved_id: _fitted_entries(
            checkpoint["state"][saved_id], parameter, name, group, recipe, cut
        )
        for saved_id, parameter, name, group in _pairs(groups, fitting)
        if saved_id in checkpoint["state"]
        for cut in [cut_of(parameter, group)]
    }
    return checkpoint


def mapping(state_dict: Any) -> Checkpoint:
    """A shallow copy of what can only then be a checkpoint."""
    if not isinstance(state_dict, Mapping):
        raise ValueError(f"a checkpoint is what state_dict() returns, got {shown(state_dict)}")
    return dict(state_dict)


def migrated(state_dict: Any) -> Checkpoint:
    """A shallow copy in today's format; without a number it is format 1."""
    checkpoint = mapping(state_dict)
    version = checkpoint.get("format", 1)
    if not isinstance(version, int) or isinstance(version, bool) or not 1 <= version <= FORMAT:
        raise ValueError(
            f"this checkpoint has format {shown(version)}; this gomuon reads formats 1 to "
            f"{FORMAT}: install a newer one"
        )
    for old in range(version, FORMAT):
        checkpoint = MIGRATIONS[old](checkpoint)
    return {**checkpoint, "format": FORMAT}


def _fitted_entries(
    saved: Mapping[Any, Any], parameter: Tensor, name: str, group: Group, recipe: Recipe, cut: Cut
) -> dict[str, Any]:
    """A parameter's state as it is loaded.

    Raises:
        ValueError: an entry is missing, unknown, of another kind or shape, or out of range.
    """
    table, is_all = entries_of(recipe.geometry)
    place = Place(name, parameter, cut, group["step"], finite=group["nonfinite"] != "allow")
    entries = {}
    # Memories first: they tell of another parameter, the rest of another cut.
    for key in sorted(saved, key=lambda key: isinstance(table.get(key), Side)):
        value = saved[key]
        if isinstance(value, Mapping) and not value:
            continue  # torch's stand-in for what a flat checkpoint lacks
        if key not in table and is_all:
            raise ValueError(
                f"the checkpoint has {shown(key)} in the state of {name!r}, which {recipe.name} "
                "does not keep"
            )
        entries[key] = checked(key, value, table[key], place) if key in table else value
    if not is_blank(entries):  # which is all zero, and never loaded
        check_together(entries, table, name)
        for key in table.keys() & entries.keys():
            check_numbers(key, entries[key], table[key], place)
    return entries


def is_blank(entries: Mapping[str, Any]) -> bool:
    """Whether a parameter's state only has the shapes of one, see `persistence`."""
    return entries.get("updates") == 0


def restored_state(
    groups: Sequence[Group], checkpoint: Checkpoint, recipe: Recipe
) -> dict[Tensor, dict[str, Any]]:
    """The fitted state on each parameter's device, in the dtypes it was saved in.

    torch's own loading rounds float32 state of bfloat16 parameters to bfloat16. Geometry that was
    one tensor when saved (a map shared by q, k and v) is one again.
    """
    copies: dict[tuple[int, torch.device], Tensor] = {}
    table, _ = entries_of(recipe.geometry)

    def restore(key: str, value: Any, parameter: Tensor) -> Any:
        if not isinstance(value, Tensor) or key == "step":  # torch's AdamW counts on the host
            return value
        if not isinstance(table.get(key), Side):  # is written to in place
            copy = value.detach().to(parameter.device, copy=True)
            if key in _SHARDED and is_sharded(parameter) and not is_sharded(value):
                return placed(copy, parameter)
            return copy
        where = (id(value), parameter.device)
        if where not in copies:
            copies[where] = value.detach().to(parameter.device, copy=True)
        return copies[where]

    return {
        parameter: {key: restore(key, value, parameter) for key, value in entries.items()}
        for saved_id, parameter, *_ in _pairs(groups, checkpoint["param_groups"])
        for entries in [checkpoint["state"].get(saved_id)]
        if entries and not is_blank(entries)
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
