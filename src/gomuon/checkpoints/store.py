"""The store: what an optimizer saves, which checkpoints fit, and how state is restored."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gomuon.checkpoints.entries import (
    CheckedParameter,
    check_codes,
    check_numbers,
    check_together,
    checked_entry,
)
from gomuon.checkpoints.saved_groups import check_method, check_structure, fitted_group
from gomuon.errors import describe_value
from gomuon.intervals import as_plain
from gomuon.parameters.groups import parameter_name
from gomuon.parameters.keeping import Keeping
from gomuon.parameters.sharding import is_sharded, local
from gomuon.parameters.state import EVERY_METHOD, Cut, Side, is_blank
from gomuon.recipes.recipe import Recipe

FORMAT = 1
_SHARDED = ("exp_avg", "exp_avg_sq")  # sharded like the parameter; all else is on the owner
Checkpoint = dict[str, Any]
# From each format to the next. A function may change the dict it is given, but not its values.
MIGRATIONS: dict[int, Callable[[Checkpoint], Checkpoint]] = {}

Group = Mapping[str, Any]
CutOf = Callable[[Tensor, Group], Cut]


class Store:
    """Saves and loads the state of one method's optimizers. It holds no state itself."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.entries = {**EVERY_METHOD, **recipe.geometry.entries}

    def saved(self, state_dict: dict[str, Any]) -> Checkpoint:
        """Torch's `state_dict` with the format number and the method's name added."""
        if state_dict["state"]:
            # Biases that join their weights have no state, nor do layers that never had a gradient.
            # torch.distributed.checkpoint would take a missing state for a damaged checkpoint.
            for group in state_dict["param_groups"]:
                for saved_id in group["params"]:
                    state_dict["state"].setdefault(saved_id, {})
        plain = [
            {key: as_plain(value) for key, value in group.items()}
            for group in state_dict["param_groups"]
        ]
        whole = {**state_dict, "param_groups": plain}
        return {**whole, "format": FORMAT, "method": self.recipe.name}

    def fitted(self, groups: Sequence[Group], state_dict: Any, cut_of: CutOf) -> Checkpoint:
        """The checkpoint ready to load: in the current format and in the order of `groups`.

        Parameters are matched by name if both sides have names, else by position as in torch.
        Everything is checked here, before anything is replaced.

        Args:
            groups: the optimizer's parameter groups.
            state_dict: any object; it is not changed.
            cut_of: how a parameter is cut into matrices in a group with given settings.

        Raises:
            ValueError: the checkpoint does not fit; the message names the first reason.
        """
        checkpoint = migrated(state_dict)
        check_structure(checkpoint)
        saved_groups = checkpoint["param_groups"]
        check_method(groups, checkpoint, self.recipe.name)
        if len(saved_groups) != len(groups):
            raise ValueError(
                f"the checkpoint has {len(saved_groups)} parameter groups, the optimizer has "
                f"{len(groups)}; make it with the groups and overrides of the one that was saved"
            )
        fitting = [
            fitted_group(index, group, saved, self.recipe)
            for index, (group, saved) in enumerate(zip(groups, saved_groups, strict=True))
        ]
        checkpoint["param_groups"] = fitting
        coded = {
            saved_id
            for saved in saved_groups
            if saved.get("state_dtype") == "int8"
            for saved_id in saved["params"]
        }
        checkpoint["state"] = {
            saved_id: self._fitted_entries(
                checkpoint["state"][saved_id],
                CheckedParameter(
                    name,
                    parameter,
                    cut_of(parameter, group),
                    group["step"],
                    finite=group["nonfinite"] != "allow",
                    coded=saved_id in coded,
                ),
            )
            for saved_id, parameter, name, group in _pairs(groups, fitting)
            if saved_id in checkpoint["state"]
        }
        return checkpoint

    def _fitted_entries(self, saved: Mapping[Any, Any], target: CheckedParameter) -> dict[str, Any]:
        """A parameter's checked state.

        Raises:
            ValueError: an entry is missing, unknown, of a wrong type or shape, or out of range.
        """
        table = self.entries
        entries = {}
        # Memories first: a wrong memory means another parameter, a wrong side only another cut.
        for key in sorted(saved, key=lambda key: isinstance(table.get(key), Side)):
            value = saved[key]
            if isinstance(value, Mapping) and not value:
                continue  # torch's placeholder for an entry that a flat checkpoint lacks
            if key not in table:
                raise ValueError(
                    f"the checkpoint has {describe_value(key)} in the state of {target.name!r}, "
                    f"which {self.recipe.name} does not have"
                )
            if isinstance(value, Tensor) and key not in _SHARDED:
                value = local(value)  # this rank's block, see distributed/block_state.py
            entries[key] = checked_entry(key, value, table[key], target)
        if not is_blank(entries):  # a blank state is all zeros and is not loaded
            check_together(entries, table, target.name)
            check_codes(entries, target)
            for key in entries:
                check_numbers(key, entries[key], table[key], target)
        return entries

    def restored(
        self, groups: Sequence[Group], checkpoint: Checkpoint
    ) -> dict[Tensor, dict[str, Any]]:
        """The state of a fitted checkpoint, on each parameter's device and in its saved dtypes.

        torch itself would round float32 state of bfloat16 parameters to bfloat16. A tensor that was
        shared when saved (such as a map of q, k and v) is shared again.
        """
        copies: dict[tuple[int, torch.device], Tensor] = {}

        def restore(key: str, value: Any, parameter: Tensor, group: Group) -> Any:
            if not isinstance(value, Tensor) or key == "step":  # torch's AdamW counts on the CPU
                return value
            if not isinstance(self.entries.get(key), Side):  # written in place: one copy each
                copy = value.detach().to(parameter.device, copy=True)
                if key in _SHARDED and is_sharded(parameter) and not is_sharded(value):
                    from gomuon.distributed.shards import sharded_like

                    return sharded_like(copy, parameter)
                return copy
            keeping = Keeping.of(group, parameter.device, frozenset())
            place = parameter.device if keeping is None else keeping.place_of(key, parameter.device)
            if (where := (id(value), place)) not in copies:
                copies[where] = value.detach().to(place, copy=True)
            return copies[where]

        return {
            parameter: {
                key: restore(key, value, parameter, group) for key, value in entries.items()
            }
            for saved_id, parameter, _, group in _pairs(groups, checkpoint["param_groups"])
            for entries in [checkpoint["state"].get(saved_id)]
            if entries and not is_blank(entries)
        }


def shallow_copy(state_dict: Any) -> Checkpoint:
    """A shallow copy of a checkpoint; raises a ValueError if it is not a dict."""
    if not isinstance(state_dict, Mapping):
        raise ValueError(
            f"a checkpoint is what state_dict() returns, got {describe_value(state_dict)}"
        )
    return dict(state_dict)


def migrated(state_dict: Any) -> Checkpoint:
    """A shallow copy in the current format. A checkpoint without a format number has format 1."""
    checkpoint = shallow_copy(state_dict)
    version = checkpoint.get("format", 1)
    if not isinstance(version, int) or isinstance(version, bool) or not 1 <= version <= FORMAT:
        raise ValueError(
            f"this checkpoint has format {describe_value(version)}; this version of gomuon reads "
            f"formats 1 to {FORMAT}: install a newer version"
        )
    for old in range(version, FORMAT):
        checkpoint = MIGRATIONS[old](checkpoint)
    return {**checkpoint, "format": FORMAT}


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
