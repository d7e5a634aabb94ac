"""Parameter groups: which parameters are matrices, and their names."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from gomuon.parameters.rates import has_one_rate
from gomuon.parameters.routing import Route, RoutingTable, Treatment, kind_of, plain_name
from gomuon.parameters.shares import decays

Group = Mapping[str, Any]


def groups_of(table: RoutingTable, settings: Group) -> list[dict[str, Any]]:
    """One group for the matrices and one for AdamW, so that each has its own lr.

    If they have one rate and one decay, biases and vectors are a group of their own: they do not
    decay.
    """
    adamw = table.treated("adamw")
    vectors = [r for r in adamw if r.kind == "vector"] if has_one_rate(settings, settings) else []
    others = [r for r in adamw if r.kind != "vector" or not vectors]
    groups: list[dict[str, Any]] = [
        {"params": table.treated("matrix"), "treatment": "matrix"},
        {"params": others, "treatment": "adamw"},
        {"params": vectors, "treatment": "adamw", "weight_decay": 0.0},
    ]
    for group in groups:
        group["params"] = [(route.name, route.parameter) for route in group["params"]]
    return [group for group in groups if group["params"]]


def is_matrix(group: Group, parameter: Tensor) -> bool:
    if group["treatment"] == "auto":
        return parameter.ndim >= 2
    return bool(group["treatment"] == "matrix")


def parameter_name(group: Group, index: int, position: int) -> str:
    """The user's name for a parameter, or else its group and position."""
    names = group.get("param_names")
    return names[position] if names else f"group {index}, parameter {position}"


def named(group: Group, index: int) -> Iterator[tuple[str, Tensor]]:
    for position, parameter in enumerate(group["params"]):
        yield parameter_name(group, index, position), parameter


def set_by_group(name: str, parameter: Tensor, group: Group) -> Route:
    """The treatment of a parameter whose group has one of its own."""
    treatment: Treatment = "matrix" if is_matrix(group, parameter) else "adamw"
    is_auto = group["treatment"] == "auto"
    reason = f"{parameter.ndim} dimensions" if is_auto else "set by its group"
    return Route(name, parameter, treatment, reason, kind=kind_of(name, parameter))


def with_groups(
    table: RoutingTable, groups: Sequence[Group], own: Collection[Tensor] = ()
) -> RoutingTable:
    """The table, with the groups' parameters that are not in it added, and what decays.

    `own` are those that only this rank has.
    """
    listed = {route.parameter for route in table}
    added = [
        set_by_group(name, parameter, group)
        for index, group in enumerate(groups)
        for name, parameter in named(group, index)
        if parameter not in listed
    ]
    whole = RoutingTable(
        replace(route, reason=f"{route.reason}; this rank's own")
        if route.parameter in own
        else route
        for route in (*table, *added)
    )
    return whole.with_note(decays(whole, {p: _decay(g, p) for g in groups for p in g["params"]}))


def _decay(group: Group, parameter: Tensor) -> float:
    of_adamw = group["treatment"] == "auto" and not is_matrix(group, parameter)
    return float(group["adamw"]["weight_decay"] if of_adamw else group.get("weight_decay", 0.0))


def names_of_model(params: Any, groups: Sequence[Group], model: nn.Module | None) -> Any:
    """The parameters of a new group with their names in the model, if other groups have names.

    Args:
        params: the `params` of a group given to `add_param_group`.
        groups: the optimizer's other groups.
        model: the attached model.
    """
    named_already = bool(groups) and "param_names" in groups[0]
    if model is None or not named_already or isinstance(params, set):
        return params  # torch itself raises an error for sets
    given = [params] if isinstance(params, Tensor) else list(params)
    if not all(isinstance(one, Tensor) for one in given):
        return given
    names: dict[Tensor, str] = {p: plain_name(name) for name, p in model.named_parameters()}
    count = sum(len(group["params"]) for group in groups)
    return [(names.get(p, f"parameter {count + i}"), p) for i, p in enumerate(given)]
