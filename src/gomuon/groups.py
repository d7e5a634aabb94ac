"""Parameter groups: who is a matrix, how it is cut, and under which name it is known."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from gomuon.capture import Watched
from gomuon.functional.checks import shown
from gomuon.layers import PLAIN, LayerSpec, check_spec
from gomuon.readers import ConvReader, Sampling, is_transposed_linear, reader_for
from gomuon.routing import Route, RoutingTable, plain_name, select

Group = Mapping[str, Any]


def groups_of(table: RoutingTable) -> list[dict[str, Any]]:
    """One group for the matrices and one for AdamW, so that schedulers scale each by its own lr."""
    groups = [
        {
            "params": [(route.name, route.parameter) for route in table.treated(treatment)],
            "treatment": treatment,
        }
        for treatment in ("matrix", "adamw")
    ]
    return [group for group in groups if group["params"]]


def is_matrix(group: Group, parameter: Tensor) -> bool:
    if group["treatment"] == "auto":
        return parameter.ndim >= 2
    return bool(group["treatment"] == "matrix")


def parameter_name(group: Group, index: int, position: int) -> str:
    """The name the user gave, or the parameter's place among the groups."""
    names = group.get("param_names")
    return names[position] if names else f"group {index}, parameter {position}"


def named(group: Group, index: int) -> Iterator[tuple[str, Tensor]]:
    for position, parameter in enumerate(group["params"]):
        yield parameter_name(group, index, position), parameter


def with_groups(table: RoutingTable, groups: Sequence[Group]) -> RoutingTable:
    """The table, and what the groups hold beyond it."""
    listed = {route.parameter for route in table}
    added = [
        Route(
            name,
            parameter,
            "matrix" if is_matrix(group, parameter) else "adamw",
            f"{parameter.ndim} dimensions"
            if group["treatment"] == "auto"
            else "asked for by its group",
        )
        for index, group in enumerate(groups)
        for name, parameter in named(group, index)
        if parameter not in listed
    ]
    return RoutingTable([*table, *added])


def joined_biases(model: nn.Module, table: RoutingTable) -> RoutingTable:
    """Route biases of matrices with their weights, for recipes that append them as a column."""
    matrices = {route.parameter for route in table.treated("matrix")}
    joined = {
        module.bias
        for module in model.modules()
        if isinstance(getattr(module, "bias", None), nn.Parameter)
        and getattr(module, "weight", None) in matrices
        and reader_for(module, Sampling()) is not None
        and getattr(module, "groups", 1) == 1
    }
    return RoutingTable(
        Route(r.name, r.parameter, "matrix", "joins its weight as a column")
        if r.parameter in joined and r.treatment == "adamw"
        else r
        for r in table
    )


def module_specs(model: nn.Module, biases: set[Tensor]) -> dict[Tensor, LayerSpec]:
    """How the weights of a model's modules are cut, from what kind of module they belong to."""
    specs: dict[Tensor, LayerSpec] = {}
    for module in model.modules():
        weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        reader = reader_for(module, Sampling())
        if reader is None or not isinstance(weight, Tensor):
            continue
        specs[weight] = LayerSpec(
            parts=reader.groups if isinstance(reader, ConvReader) else 1,
            transposed=is_transposed_linear(module),
            bias=bias if bias is not None and bias in biases else None,
        )
    return specs


def layer_specs(
    model: nn.Module,
    biases: set[Tensor],
    patterns: Mapping[str, LayerSpec],
    *,
    captured: bool = False,
) -> dict[Tensor, LayerSpec]:
    """How parameters are cut into matrices: by module, then as a user's `specs` say.

    Raises:
        ValueError: a pattern matches nothing, or a parameter cannot be cut so; where moments are
            captured they come by module, which a `block` does not follow.
    """
    specs = module_specs(model, biases)
    names = {plain_name(name): p for name, p in model.named_parameters()}
    for name, spec in select(patterns, list(names), "specs"):
        if not isinstance(spec, LayerSpec):
            raise TypeError(f"specs must give {name!r} a LayerSpec, got {shown(spec)}")
        own = specs.get(names[name], PLAIN)
        if own.parts > 1 and (spec.rows, spec.columns) != (own.parts, 1):
            raise ValueError(
                f"{name!r} is a convolution of {own.parts} groups, each a matrix of its own; it "
                f"cannot be cut into {spec.rows} × {spec.columns}: leave it out of specs"
            )
        if captured and spec.block is not None:
            raise ValueError(
                f"block={spec.block} of {name!r} does not go with captured moments; say heads, "
                "input_heads or parts"
            )
        # How a weight is stored and what joins it is the module's affair, not the user's.
        merged = replace(spec, transposed=own.transposed or spec.transposed, bias=own.bias)
        check_spec(name, names[name], merged)
        specs[names[name]] = merged
    return specs


def watched_modules(
    model: nn.Module, sampling: Callable[[Tensor], Sampling]
) -> dict[Tensor, list[Watched]]:
    """Modules by weight: those whose input and output gradient can be captured."""
    modules: dict[Tensor, list[Watched]] = {}
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, nn.Parameter) or not weight.numel():
            continue
        reader = reader_for(module, sampling(weight))
        if reader is None:
            continue
        m, n = weight.shape[0], weight.numel() // weight.shape[0]
        m, n = (n, m) if is_transposed_linear(module) else (m, n)
        n += reader.sampling.ones
        groups = (reader.groups,) if isinstance(reader, ConvReader) and reader.groups > 1 else ()
        m //= groups[0] if groups else 1
        modules.setdefault(weight, []).append(
            Watched(module, reader, (*groups, n, n), (*groups, m, m))
        )
    return modules


def cut(spec: LayerSpec, group: Group) -> LayerSpec:
    """Sides above `block_size` in pieces of that size, where a group has one."""
    size = group.get("block_size")
    plain = replace(spec, transposed=False) == PLAIN
    return replace(spec, block=size) if size is not None and plain else spec
