"""The parameter groups of a checkpoint: checked, then matched with the optimizer's groups."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from gomuon.checkpoints.entries import is_count
from gomuon.errors import describe_value
from gomuon.intervals import from_plain
from gomuon.parameters.groups import is_matrix, named
from gomuon.parameters.routing import plain_name
from gomuon.recipes.recipe import Recipe
from gomuon.recipes.registry import renamed, setting_names
from gomuon.settings import check_settings, checked_names, python_value

Group = Mapping[str, Any]
_KINDS = {True: "a matrix", False: "an AdamW parameter"}


def check_structure(checkpoint: Mapping[str, Any]) -> None:
    """Raise a ValueError unless the checkpoint has parameter groups and states of parameters."""
    state, groups = checkpoint.get("state"), checkpoint.get("param_groups")
    if not isinstance(state, Mapping):
        raise ValueError(f"'state' of the checkpoint must be a dict, got {describe_value(state)}")
    if not isinstance(groups, (list, tuple)):
        raise ValueError(
            f"'param_groups' of the checkpoint must be a list, got {describe_value(groups)}"
        )
    known: set[int | str] = set()
    for index, group in enumerate(groups):
        _check_group(index, group)
        if twice := known.intersection(group["params"]):
            raise ValueError(f"the checkpoint has parameter {twice.pop()!r} in two groups")
        known.update(group["params"])
    for key, entries in state.items():
        if key not in known:
            raise ValueError(
                f"the checkpoint has a state for parameter {describe_value(key)}, which is in none "
                "of its groups"
            )
        if not isinstance(entries, Mapping):
            raise ValueError(
                f"the state of parameter {key!r} must be a dict in the checkpoint, got "
                f"{describe_value(entries)}"
            )


def _check_group(index: int, group: Any) -> None:
    where = f"group {index} of the checkpoint"
    if not isinstance(group, Mapping) or not all(isinstance(key, str) for key in group):
        raise ValueError(f"{where} must be a dict with names as keys, got {describe_value(group)}")
    ids: Any = group.get("params")
    names: Any = group.get("param_names")
    if not _is_list_of(ids, (int, str)):
        raise ValueError(
            f"{where} must have a list 'params' of numbers or names, got {describe_value(ids)}"
        )
    if len(set(ids)) != len(ids):
        raise ValueError(f"{where} has a parameter twice in 'params'")
    if names is not None and not _is_list_of(names, (str,)):
        raise ValueError(
            f"'param_names' of {where} must be a list of names, got {describe_value(names)}"
        )
    for name in ("step", "skipped"):
        if name in group and not is_count(group[name]):
            raise ValueError(
                f"{name} of {where} must be a whole number >= 0, got {describe_value(group[name])}"
            )


def _is_list_of(things: Any, kinds: tuple[type, ...]) -> bool:
    return isinstance(things, (list, tuple)) and all(
        isinstance(thing, kinds) and not isinstance(thing, bool) for thing in things
    )


def check_method(groups: Sequence[Group], checkpoint: Mapping[str, Any], method: str) -> None:
    """Raise a ValueError if the checkpoint is of another method."""
    saved, saved_groups = checkpoint.get("method"), checkpoint["param_groups"]
    written = method if saved is None else saved
    now = renamed(written, saved_groups) if isinstance(written, str) else None
    if now is not None and written == method:
        raise ValueError(
            f"this checkpoint is of an older version, whose {written} is {now} now; load it with "
            f"{now}, or start anew with {method}"
        )
    if saved is not None:
        if (now or saved) != method:
            name = saved if isinstance(saved, str) else describe_value(saved)
            raise ValueError(
                f"this is a checkpoint of {now or name}, but the optimizer is {method}; load it "
                "with an optimizer of the same method"
            )
        return
    # torch.distributed.checkpoint does not save the method. Another method's setting shows it.
    others = setting_names()
    for group, saved_group in zip(groups, saved_groups, strict=False):
        for name in saved_group:
            if name in others and name not in group:
                raise ValueError(
                    f"the checkpoint is of another method: {method} has no setting {name!r}"
                )


def fitted_group(index: int, group: Group, saved: Group, recipe: Recipe) -> dict[str, Any]:
    """A saved group to load: in the optimizer's order, complete, and with checked settings.

    Other keys, such as a scheduler's `initial_lr` or the user's own, are left unchanged.

    Args:
        index: the group's index, for messages.
        group: the optimizer's group.
        saved: the checkpoint's group.
        recipe: the method's recipe.
    """
    fitting = _in_order(index, group, saved)
    if recipe.older is not None and recipe.older.include([saved]):
        fitting = {**recipe.older.settings, **fitting}
    # Other settings that are newer than the checkpoint keep the optimizer's values.
    checked = checked_names(recipe.settings)
    setting_keys = [name for name in group if name in checked or name in ("adamw", "step")]
    for name in setting_keys:
        fitting.setdefault(name, group[name])
    if isinstance(fitting["adamw"], Mapping):
        fitting["adamw"] = {**group["adamw"], **_without_tensors(fitting["adamw"])}
    if fitting.get("polar") == "polar-express":  # the name of version 0.1.0 for exact products
        fitting["polar"] = "exact"
    settings = _without_tensors({name: fitting[name] for name in setting_keys if name != "step"})
    check_settings(settings, recipe.settings, f"group {index} of the checkpoint: ")
    fitting |= settings
    for name, parameter in named(group, index):
        there, here = is_matrix(fitting, parameter), is_matrix(group, parameter)
        if there != here:
            raise ValueError(
                f"{name!r} is {_KINDS[there]} in the checkpoint and {_KINDS[here]} here; load it "
                "with the routes and group treatments it was saved with"
            )
    return fitting


def _without_tensors(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as Python values. An lr tensor stays a tensor, because schedulers write to it."""
    return {
        name: value.reshape(()) if _is_rate(name, value) else from_plain(python_value(value))
        for name, value in settings.items()
    }


def _is_rate(name: str, value: Any) -> bool:
    return name == "lr" and isinstance(value, Tensor) and value.numel() == 1


def _in_order(index: int, group: Group, saved: Group) -> dict[str, Any]:
    """The saved group with its parameters in the optimizer's order."""
    own, ids = group.get("param_names"), list(saved["params"])
    # get_state_dict puts names into `params` and leaves `param_names` in the saved order.
    ids_are_names = bool(ids) and all(isinstance(name, str) for name in ids)
    names = ids if ids_are_names else saved.get("param_names")
    if len(ids) != len(group["params"]):
        raise ValueError(
            f"group {index} of the checkpoint has {len(ids)} parameters, the optimizer's group "
            f"has {len(group['params'])}{_first_difference(own, names)}"
        )
    if names is not None and len(names) != len(ids):
        raise ValueError(
            f"group {index} of the checkpoint has {len(ids)} parameters and {len(names)} names"
        )
    fitting = {key: value for key, value in saved.items() if key != "param_names"}
    if own is None or names is None:
        known = names if own is None else own
        return {**fitting, **({} if known is None else {"param_names": list(known)})}
    places = {name: place for place, name in enumerate(_without_wrapper_prefixes(names))}
    wanted = _without_wrapper_prefixes(own)
    if places.keys() == set(wanted) and len(places) == len(wanted):
        ids = [ids[places[name]] for name in wanted]
    elif not ids_are_names:  # if so, torch has matched them, tied ones perhaps by another name
        raise ValueError(
            f"group {index} of the checkpoint has other parameters than the optimizer's group"
            f"{_first_difference(own, names)}"
        )
    return {**fitting, "params": ids, "param_names": list(own)}


def _without_wrapper_prefixes(names: Sequence[str]) -> list[str]:
    """Parameter names without the prefixes of DistributedDataParallel and torch.compile."""
    bare = [plain_name(name).removeprefix("module.") for name in names]
    return bare if len(set(bare)) == len(bare) else list(names)


def _first_difference(own: Sequence[str] | None, saved: Sequence[str] | None) -> str:
    if own is None or saved is None:
        return ""
    bare, saved_bare = _without_wrapper_prefixes(own), _without_wrapper_prefixes(saved)
    differences = [
        f"{name!r} is only in the {where}"
        for where, here, there in (
            ("checkpoint", saved_bare, bare),
            ("optimizer", bare, saved_bare),
        )
        for name in [next((name for name in here if name not in there), None)]
        if name is not None
    ]
    return f": {', '.join(differences)}" if differences else ""
