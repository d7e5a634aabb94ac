"""`overrides`: settings of single parameters of a model, by pattern or by function."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from gomuon.errors import describe_value
from gomuon.parameters.routing import RoutingTable, plain_name, select
from gomuon.settings import ADAMW_SETTINGS, NOT_NEGATIVE, Settings, check_settings

Override = Mapping[str, Any]
Overrides = (
    Mapping[str, Override] | Callable[[str, nn.Module, nn.Parameter], Override | None] | None
)
FACTOR = "lr_factor"  # times the rate that the parameter has otherwise
# What torch's AdamW takes is in a group's `adamw`; these of it are also the group's own.
_OF_ADAMW_GROUPS = ("lr", "weight_decay", "cautious_decay")


def overridden(
    groups: Iterable[Mapping[str, Any]],
    table: RoutingTable,
    model: nn.Module,
    overrides: Overrides,
    settings: Settings,
    defaults: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """The groups of a model, divided so that parameters with settings of their own are groups.

    Parameters without an override stay in their groups, which come first.

    Args:
        groups: the groups without overrides; `params` are pairs of names and parameters.
        table: the routing of the model.
        model: the model, without a wrapper.
        overrides: settings by pattern of names, of which the first that matches counts; or a
            function of (name, module, parameter) that returns settings or None.
        settings: the method's settings.
        defaults: the constructor's values.

    Raises:
        TypeError: overrides are no dict or function, or settings are no dict.
        ValueError: a pattern is without effect, a setting is unknown or out of range, or a
            parameter cannot follow it.
    """
    if overrides is None:
        return [dict(group) for group in groups]
    treatments = {route.name: route.treatment for route in table}
    chosen = _chosen(overrides, table, model)
    for name, (where, override) in chosen.items():
        _check_values(where, override, settings)
        if override and treatments[name] == "frozen":
            raise ValueError(
                f"{where} cannot apply to {name!r}, which is not trained; narrow the pattern, or "
                "train the parameter"
            )
    _check_joined(chosen, table)
    kept: list[dict[str, Any]] = []
    added: list[dict[str, Any]] = []
    for group in groups:
        own = [(name, p) for name, p in group["params"] if not chosen.get(name, ("", {}))[1]]
        if own:
            kept.append({**group, "params": own})
        divided: dict[str, dict[str, Any]] = {}
        for name, parameter in group["params"]:
            where, override = chosen.get(name, ("", {}))
            if not override:
                continue
            key = where if isinstance(overrides, Mapping) else repr(sorted(override.items()))
            if key not in divided:
                divided[key] = {**group, "params": []}
                translate = _for_adamw if group["treatment"] == "adamw" else _for_matrices
                divided[key] |= translate(where, name, override, group, settings, defaults)
            divided[key]["params"].append((name, parameter))
        added += divided.values()
    return [*kept, *added]


def _chosen(
    overrides: Overrides, table: RoutingTable, model: nn.Module
) -> dict[str, tuple[str, Override]]:
    """For every overridden parameter: where its settings are from, and the settings."""
    names = [route.name for route in table]
    if isinstance(overrides, Mapping):
        found = dict(select({key: key for key in overrides}, names, "overrides"))
        for pattern in overrides:
            if pattern not in found.values():
                raise ValueError(
                    f"overrides has {pattern!r}, but an earlier pattern matches all of its "
                    "parameters; the first match counts, so put it before them"
                )
        chosen = {name: (f"overrides[{key!r}]", overrides[key]) for name, key in found.items()}
    elif callable(overrides):
        modules = _modules(model)
        chosen = {}
        for route in table:
            override = overrides(route.name, modules[route.parameter], route.parameter)  # type: ignore[arg-type]
            if override is not None:
                chosen[route.name] = (f"overrides of {route.name!r}", override)
    else:
        raise TypeError(
            f"overrides must be a dict, a function or None, got {describe_value(overrides)}"
        )
    for where, override in chosen.values():
        if not isinstance(override, Mapping):
            raise TypeError(f"{where} must be a dict of settings, got {describe_value(override)}")
    return chosen


def _modules(model: nn.Module) -> dict[Tensor, nn.Module]:
    found: dict[Tensor, nn.Module] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            found.setdefault(parameter, module)
    return found


def _check_values(where: str, override: Override, settings: Settings) -> None:
    start = f"{where}: "
    check_settings({k: v for k, v in override.items() if k != FACTOR}, settings, start)
    check_settings(
        {k: v for k, v in override.items() if k in ADAMW_SETTINGS and k not in settings},
        ADAMW_SETTINGS,
        start,
    )
    if FACTOR in override:
        factor = override[FACTOR]
        is_number = isinstance(factor, (int, float)) and not isinstance(factor, bool)
        if not (is_number and 0 <= factor < math.inf):
            raise ValueError(
                f"{start}{FACTOR} must be {NOT_NEGATIVE.expected}, got {describe_value(factor)}"
            )
        if "lr" in override or "lr" in override.get("adamw", {}):
            raise ValueError(f"{where} has lr and {FACTOR}; give one of them")


def _for_matrices(
    where: str,
    name: str,
    override: Override,
    group: Mapping[str, Any],
    settings: Settings,
    defaults: Mapping[str, Any],
) -> dict[str, Any]:
    own = {key: value for key, value in override.items() if key != "adamw"}
    _check_followed(where, name, "a matrix", own, [*settings, FACTOR])
    if not own:
        raise ValueError(
            f"{where} has only settings of AdamW, but {name!r} is a matrix; narrow the pattern"
        )
    return _with_rate(own, group.get("lr", defaults["lr"]))


def _for_adamw(
    where: str,
    name: str,
    override: Override,
    group: Mapping[str, Any],
    settings: Settings,
    defaults: Mapping[str, Any],
) -> dict[str, Any]:
    """What stands under `adamw`, if anything does; otherwise the settings themselves."""
    own = dict(override.get("adamw", {}))
    if own:
        own |= {key: override[key] for key in (FACTOR,) if key in override}
    else:
        own = {key: value for key, value in override.items() if key != "adamw"}
    both = [*ADAMW_SETTINGS, *(key for key in _OF_ADAMW_GROUPS if key in settings), FACTOR]
    _check_followed(where, name, "updated by AdamW", own, both)
    adamw = {key: value for key, value in own.items() if key in ("betas", "eps")}
    top = {key: value for key, value in own.items() if key not in adamw}
    known = {**defaults["adamw"], **group.get("adamw", {})}
    rate = group.get("lr", known["lr"])
    return {**_with_rate(top, rate), "adamw": {**group.get("adamw", {}), **adamw}}


def _with_rate(own: Override, rate: Any) -> dict[str, Any]:
    if FACTOR not in own:
        return dict(own)
    rest = {key: value for key, value in own.items() if key != FACTOR}
    return {**rest, "lr": rate * own[FACTOR]}


def _check_followed(
    where: str, name: str, treatment: str, own: Override, known: Iterable[str]
) -> None:
    for key in own:
        if key not in known:
            raise ValueError(
                f"{where} sets {key}, which {name!r} cannot follow: it is {treatment}, and has "
                f"{', '.join(dict.fromkeys(known))}. Narrow the pattern, or put an earlier one for "
                f"{name!r} before it; AdamW's settings can stand apart, under 'adamw'"
            )


def _check_joined(chosen: Mapping[str, tuple[str, Override]], table: RoutingTable) -> None:
    """A bias that joins its weight as a column is in one matrix with it."""
    for route in table:
        if route.reason != "joins its weight as a column":
            continue
        weight = plain_name(f"{route.name.rpartition('.')[0]}.weight".removeprefix("."))
        own, its = (chosen.get(name, ("", {})) for name in (route.name, weight))
        if own[1] != its[1]:
            raise ValueError(
                f"{(own[0] or its[0])} gives {route.name!r} and {weight!r} different settings, but "
                "they are one matrix: the bias joins its weight as a column. Match both"
            )
