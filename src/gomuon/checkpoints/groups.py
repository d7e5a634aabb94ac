"""The groups of a checkpoint: of which types they must be, and fitted to the optimizer's own."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from gomuon.checkpoints.entries import is_count
from gomuon.errors import shown
from gomuon.parameters.groups import is_matrix, named
from gomuon.parameters.routing import plain_name
from gomuon.recipes.recipe import Recipe
from gomuon.recipes.registry import setting_names
from gomuon.settings import check_settings, checked_names, plain

Group = Mapping[str, Any]
_KINDS = {True: "a matrix", False: "AdamW's"}


def check_structure(checkpoint: Mapping[str, Any]) -> None:
    """Raise a ValueError unless these are groups of parameters and a state for each of those."""
    state, groups = checkpoint.get("state"), checkpoint.get("param_groups")
    if not isinstance(state, Mapping):
        raise ValueError(f"'state' of the checkpoint must be a dict, got {shown(state)}")
    if not isinstance(groups, (list, tuple)):
        raise ValueError(f"'param_groups' of the checkpoint must be a list, got {shown(groups)}")
    known: set[int | str] = set()
    for index, group in enumerate(groups):
        _check_group(index, group)
        if twice := known.intersection(group["params"]):
            raise ValueError(f"the checkpoint has parameter {twice.pop()!r} in two groups")
        known.update(group["params"])
    for key, entries in state.items():
        if key not in known:
            raise ValueError(
                f"the checkpoint has a state for parameter {shown(key)}, which is in none of its "
                "groups"
            )
        if not isinstance(entries, Mapping):
            raise ValueError(
                f"the state of parameter {key!r} must be a dict in the checkpoint, got "
                f"{shown(entries)}"
            )


def _check_group(index: int, group: Any) -> None:
    where = f"group {index} of the checkpoint"
    if not isinstance(group, Mapping) or not all(isinstance(key, str) for key in group):
        raise ValueError(f"{where} must be a dict with names for keys, got {shown(group)}")
    ids: Any = group.get("params")
    names: Any = group.get("param_names")
    if not _is_list_of(ids, (int, str)):
        raise ValueError(f"{where} must have a list 'params' of numbers or names, got {shown(ids)}")
    if len(set(ids)) != len(ids):
        raise ValueError(f"{where} has a parameter twice in 'params'")
    if names is not None and not _is_list_of(names, (str,)):
        raise ValueError(f"'param_names' of {where} must be a list of names, got {shown(names)}")
    for name in ("step", "skipped"):
        if name in group and not is_count(group[name]):
            raise ValueError(
                f"{name} of {where} must be a whole number >= 0, got {shown(group[name])}"
            )


def _is_list_of(things: Any, kinds: tuple[type, ...]) -> bool:
    return isinstance(things, (list, tuple)) and all(
        isinstance(thing, kinds) and not isinstance(thing, bool) for thing in things
    )


def check_method(groups: Sequence[Group], checkpoint: Mapping[str, Any], method: str) -> None:
    """Raise a ValueError where a checkpoint is another method's."""
    saved = checkpoint.get("method")
    if saved is not None:
        if saved != method:
            raise ValueError(
                f"this is a checkpoint of {saved if isinstance(saved, str) else shown(saved)}; it "
                f"cannot go on with {method}"
            )
        return
    # torch.distributed.checkpoint saves state and groups only: another method's setting shows it.
    others = setting_names()
    for group, saved_group in zip(groups, checkpoint["param_groups"], strict=False):
        for name in saved_group:
            if name in others and name not in group:
                raise ValueError(
                    f"the checkpoint is of another method: {method} has no setting {name!r}"
                )


def fitted_group(index: int, group: Group, saved: Group, recipe: Recipe) -> dict[str, Any]:
    """A saved group as it is loaded: in the optimizer's order, complete, and in range.

    What else a group carries, a scheduler's `initial_lr` or a user's own, is left as it is.

    Args:
        index: which group it is, for messages.
        group: the optimizer's.
        saved: the checkpoint's.
        recipe: the method's.
    """
    fitting = _in_order(index, group, saved)
    # Settings a checkpoint was written without, because they came later, keep their values.
    checked = checked_names(recipe.settings)
    ours = [name for name in group if name in checked or name in ("adamw", "step")]
    for name in ours:
        fitting.setdefault(name, group[name])
    if isinstance(fitting["adamw"], Mapping):
        fitting["adamw"] = {**group["adamw"], **_without_tensors(fitting["adamw"])}
    settings = _without_tensors({name: fitting[name] for name in ours if name != "step"})
    check_settings(settings, recipe.settings, f"group {index} of the checkpoint: ")
    fitting |= settings
    for name, parameter in named(group, index):
        there, here = is_matrix(fitting, parameter), is_matrix(group, parameter)
        if there != here:
            raise ValueError(
                f"{name!r} is {_KINDS[there]} in the checkpoint and {_KINDS[here]} here; was it "
                "saved with other routes, or another treatment of its group?"
            )
    return fitting


def _without_tensors(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers in tensors as numbers; a rate stays in its tensor, where a scheduler writes."""
    return {
        name: value.reshape(()) if _is_rate(name, value) else plain(value)
        for name, value in settings.items()
    }


def _is_rate(name: str, value: Any) -> bool:
    return name == "lr" and isinstance(value, Tensor) and value.numel() == 1


def _in_order(index: int, group: Group, saved: Group) -> dict[str, Any]:
    """The saved group, its parameters in the order of the optimizer's."""
    own, ids = group.get("param_names"), list(saved["params"])
    # get_state_dict calls parameters by their names and leaves `param_names` in the saved order.
    called_by_name = bool(ids) and all(isinstance(name, str) for name in ids)
    names = ids if called_by_name else saved.get("param_names")
    if len(ids) != len(group["params"]):
        raise ValueError(
            f"group {index} of the checkpoint has {len(ids)} parameters, the optimizer's "
            f"{len(group['params'])}{_first_difference(own, names)}"
        )
    if names is not None and len(names) != len(ids):
        raise ValueError(
            f"group {index} of the checkpoint has {len(ids)} parameters and {len(names)} names"
        )
    fitting = {key: value for key, value in saved.items() if key != "param_names"}
    if own is None or names is None:
        known = names if own is None else own
        return {**fitting, **({} if known is None else {"param_names": list(known)})}
    places = {name: place for place, name in enumerate(_unwrapped(names))}
    wanted = _unwrapped(own)
    if places.keys() == set(wanted) and len(places) == len(wanted):
        ids = [ids[places[name]] for name in wanted]
    elif not called_by_name:  # else torch has matched them, a tied one perhaps by its other name
        raise ValueError(
            f"group {index} of the checkpoint has other parameters than the optimizer's"
            f"{_first_difference(own, names)}"
        )
    return {**fitting, "params": ids, "param_names": list(own)}


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
