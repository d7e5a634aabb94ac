"""The parameter groups of a model: by its routing, as the user has divided them, and overrides."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from gomuon.errors import describe_value
from gomuon.parameters.groups import set_by_group
from gomuon.parameters.layout import Layout
from gomuon.parameters.rates import has_one_rate
from gomuon.parameters.routing import Route, Routes, RoutingTable, route
from gomuon.parameters.specs import joined_biases
from gomuon.recipes.overrides import Overrides, overridden
from gomuon.recipes.recipe import Recipe
from gomuon.settings import check_settings

Groups = list[dict[str, Any]]


def groups_and_model(
    recipe: Recipe, params: Any, model: nn.Module | None, needing: Mapping[str, Any]
) -> tuple[Iterable[Any] | None, nn.Module | None]:
    """The parameters or groups that were given, and the model; each may be None.

    Args:
        recipe: the method's recipe.
        params: what the optimizer was given first: a model, parameters or groups.
        model: what it was given beside them.
        needing: keywords that need the model.

    Raises:
        TypeError: params or model is something else.
        ValueError: the model is needed and missing, or there are two.
    """
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module or None, got {describe_value(model)}")
    if isinstance(params, nn.Module):
        if model is not None and model is not params:
            raise ValueError("two models were given; model= goes with parameters or groups of it")
        return None, params
    if model is None and any(value is not None for value in needing.values()):
        *names, last = needing
        raise ValueError(
            f"{', '.join(names)} and {last} need the model: pass the model, or model= beside its "
            "parameters"
        )
    if not isinstance(params, Iterable):
        raise TypeError(
            f"params must be a model, parameters or parameter groups, got {describe_value(params)}"
        )
    if model is None and recipe.model_use.needs_model:
        raise ValueError(recipe.model_use.needs_model)
    return params, model


def routed(
    recipe: Recipe,
    model: nn.Module,
    layout: Layout,
    routes: Routes = None,
    example_input: Any = None,
) -> RoutingTable:
    """The routing of a model, as a method changes it."""
    table = route(model, routes, example_input, gathers=layout.gathers)
    table = joined_biases(model, table, layout.blocks) if recipe.joins_bias else table
    return recipe.model_use.route(model, table)


def groups_of_model(
    recipe: Recipe,
    model: nn.Module,
    given: Iterable[Any] | None,
    defaults: Mapping[str, Any],
    layout: Layout,
    *,
    routes: Routes = None,
    example_input: Any = None,
    overrides: Overrides = None,
) -> tuple[RoutingTable, Groups]:
    """The routing of a model, and its parameter groups.

    Args:
        recipe: the method's recipe.
        model: the model, without a wrapper.
        given: parameters or groups as for torch.optim; None: all parameters of the model.
        defaults: the constructor's settings.
        layout: knows how tensor parallelism divides the model.
        routes, example_input, overrides: as for the optimizer.
    """
    table = routed(recipe, model, layout, routes, example_input)
    if given is None:
        groups = recipe.model_use.groups(table, defaults)
    else:
        table, groups = _divided(recipe, table, given, defaults)
    groups = overridden(groups, table, model, overrides, recipe.settings, defaults)
    return table, groups


def _divided(
    recipe: Recipe, table: RoutingTable, given: Iterable[Any], defaults: Mapping[str, Any]
) -> tuple[RoutingTable, Groups]:
    """The user's groups, each divided into its matrices and what AdamW updates.

    A group's settings apply to its matrices, and to AdamW's part as far as they have one rate: then
    its `lr` and `weight_decay`. Otherwise AdamW's are those under its `adamw`.
    """
    routes = {one.parameter: one for one in table}
    groups: Groups = []
    held: dict[Tensor, Route] = {}
    for own in _as_groups(given):
        members = [_member(one, routes) for one in own.pop("params")]
        if "treatment" in own:
            check_settings({"treatment": own["treatment"]}, {})
            members = [
                replace(set_by_group(one.name, one.parameter, own), kind=one.kind)
                for one in members
            ]
        for member in members:
            held[member.parameter] = member
        if "treatment" in own:
            groups.append({**own, "params": [(one.name, one.parameter) for one in members]})
            continue
        part = RoutingTable(members)
        for group in recipe.model_use.groups(part, {**defaults, **own}):
            of_adamw = group["treatment"] == "adamw"
            rates = ("lr", "weight_decay", "base_lr")
            shared = not of_adamw or has_one_rate(own, defaults)
            settings = {k: v for k, v in own.items() if shared or k not in rates}
            groups.append({**group, **settings})
    left_out = [
        held[one.parameter]
        if one.parameter in held
        else Route(one.name, one.parameter, "frozen", "in no group", kind=one.kind)
        for one in table
    ]
    return RoutingTable(left_out), groups


def _as_groups(given: Iterable[Any]) -> Groups:
    entries = list(given)
    if not entries:
        raise ValueError("params is empty; give parameters of the model, or only the model")
    if not isinstance(entries[0], Mapping):
        return [{"params": entries}]
    for entry in entries:
        if not isinstance(entry, Mapping) or "params" not in entry:
            raise ValueError(f"a group must have 'params', got {describe_value(entry)}")
    groups = [dict(entry) for entry in entries]
    for group in groups:
        params = group["params"]
        group["params"] = [params] if isinstance(params, Tensor) else list(params)
    return groups


def _member(one: Any, routes: Mapping[Tensor, Route]) -> Route:
    parameter = one[1] if isinstance(one, tuple) else one
    if not isinstance(parameter, Tensor):
        raise TypeError(f"a group's params must be parameters, got {describe_value(parameter)}")
    if parameter not in routes:
        raise ValueError(
            f"a group has {describe_value(parameter)}, which is not a parameter of the model; give "
            "model= a module that holds all of them, such as an nn.ModuleList"
        )
    found = routes[parameter]
    if found.treatment == "frozen":
        raise ValueError(f"a group has {found.name!r}, which routes leave out; drop one of the two")
    return found
