"""Decides the treatment of each parameter of a model, with the reason."""

import difflib
import fnmatch
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeVar, get_args

import torch
from torch import Tensor, nn

from gomuon.errors import describe_value
from gomuon.parameters.experts import how_to_stack, why_stack
from gomuon.parameters.rows import ConvRows, rows_for
from gomuon.parameters.sampling import Sampling
from gomuon.parameters.sharding import is_sharded, why_not_supported
from gomuon.parameters.tensor_shards import tensor_shards

Choice = TypeVar("Choice")
Treatment = Literal["matrix", "adamw", "frozen"]
Routes = Mapping[str, Treatment] | Callable[[str, nn.Module, nn.Parameter], Treatment | None] | None

# Their kernels multiply inside of one operation, so nothing can be captured.
RECURRENT = (nn.RNNBase, nn.RNNCellBase)

# Usual names of the layer that computes the logits.
_HEAD_NAMES = {"lm_head", "head", "classifier", "output_head", "embed_out", "unembed", "score"}


@dataclass(frozen=True)
class Route:
    """A parameter, its treatment, and the reason.

    `geometry` says which factors a matrix has (outputs × inputs), if its method captures moments.
    """

    name: str
    parameter: Tensor
    treatment: Treatment
    reason: str
    geometry: str = ""


class RoutingTable(tuple[Route, ...]):
    """The routes of a model, in the order of its parameters. Prints as a table."""

    def treated(self, treatment: Treatment) -> list[Route]:
        return [route for route in self if route.treatment == treatment]

    def with_geometry(self, geometry: Mapping[Tensor, str]) -> "RoutingTable":
        """The table, with the geometry of matrices by parameter."""
        return RoutingTable(replace(r, geometry=geometry.get(r.parameter, "")) for r in self)

    def __str__(self) -> str:
        columns: dict[str, list[str]] = {
            "parameter": [r.name for r in self],
            "shape": ["×".join(map(str, r.parameter.shape)) or "scalar" for r in self],
            "treatment": [r.treatment for r in self],
            "geometry": [r.geometry for r in self],
            "reason": [r.reason for r in self],
        }
        if not any(columns["geometry"]):
            del columns["geometry"]
        table = [tuple(columns), *zip(*columns.values(), strict=True)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in table
        ]
        return "\n".join(lines)


def route(model: nn.Module, routes: Routes = None) -> RoutingTable:
    """Give every parameter of `model` a treatment.

    Args:
        model: the model to train.
        routes: overrides. Either a dict from glob patterns of parameter names to treatments, or a
            function of (name, module, parameter) that returns a treatment or None.

    Raises:
        ValueError: the model has no parameter or no hidden matrix, a parameter cannot be trained,
            or an override matches no parameter or has an unknown treatment.
    """
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise ValueError(
            "FullyShardedDataParallel (FSDP1) flattens parameters, so there are no matrices; use "
            "fully_shard (FSDP2) from torch.distributed.fsdp, or DistributedDataParallel"
        )
    owners = _owners(model)
    shards = tensor_shards(model)
    if not owners:
        raise ValueError(f"{type(model).__name__} has no parameters to optimize")
    override = _override(routes, [homes[0][0] for homes in owners.values()])
    head = _output_head(model)
    table = []
    for parameter, homes in owners.items():
        name, module = homes[0]
        treatment, reason = override(name, module, parameter), "set by routes"
        if treatment is None:
            check_trainable(name, parameter, divided=parameter in shards)
            treatment, reason = _treatment(parameter, homes, head)
        elif treatment != "frozen":
            check_trainable(name, parameter, divided=parameter in shards)
        if parameter in shards and (place := shards[parameter].describe()):
            reason = f"{reason}; {place}"
        table.append(Route(name, parameter, treatment, reason))
    result = RoutingTable(table)
    if not result.treated("matrix"):
        raise ValueError(
            f"{type(model).__name__} has no linear layer or convolution, so a matrix optimizer has "
            "nothing to do; use torch.optim.AdamW, or select matrices with "
            f'routes={{pattern: "matrix"}}. Its parameters:\n{result}'
        )
    return result


def check_trainable(name: str, parameter: Tensor, *, divided: bool = False) -> None:
    """Raise a ValueError for a parameter that cannot be trained.

    `divided` says that its place in tensor parallelism is known, and checked.
    """
    if nn.parameter.is_lazy(parameter):
        raise ValueError(
            f"parameter {name!r} is not initialised yet; run one forward pass before you make the "
            "optimizer"
        )
    if parameter.is_complex() or not parameter.is_floating_point():
        raise ValueError(
            f"parameter {name!r} is {parameter.dtype}; expected a real floating-point dtype (leave "
            f'it out with routes={{{name!r}: "frozen"}})'
        )
    if is_sharded(parameter) and not divided and (reason := why_not_supported(name, parameter)):
        raise ValueError(reason)
    if parameter.layout != torch.strided:
        raise ValueError(
            f"parameter {name!r} has layout {parameter.layout}; expected a dense tensor"
        )


# Parts that wrappers insert into module names.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


def plain_name(name: str) -> str:
    """A parameter's name without the parts that compiling and checkpointing insert."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _owners(model: nn.Module) -> dict[nn.Parameter, list[tuple[str, nn.Module]]]:
    """The names and modules of each parameter; several if it is tied."""
    owners: dict[nn.Parameter, list[tuple[str, nn.Module]]] = {}
    for prefix, module in model.named_modules():
        for leaf, parameter in module.named_parameters(prefix, recurse=False):
            owners.setdefault(parameter, []).append((plain_name(leaf), module))
    return owners


def _treatment(
    parameter: nn.Parameter, homes: list[tuple[str, nn.Module]], head: nn.Module | None
) -> tuple[Treatment, str]:
    modules = [module for _, module in homes]
    tied = f", tied to {homes[1][0]}" if len(homes) > 1 else ""
    for module in modules:
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            if module.sparse:
                raise ValueError(
                    f"embedding {homes[0][0]!r} has sparse=True, but sparse gradients are not "
                    "supported; make it with sparse=False"
                )
            return "adamw", f"embedding{tied}"
    rows = [rows_for(module, Sampling()) for module in modules]
    if all(rows) and parameter.ndim >= 2:
        if head in modules:
            return "adamw", f"output head{tied}"
        conv = any(isinstance(one, ConvRows) for one in rows)
        return "matrix", f"{'convolution' if conv else 'linear layer'}{tied}"
    if isinstance(modules[0], nn.MultiheadAttention) and parameter.ndim == 2:
        return "matrix", "attention projection"
    if (experts := why_stack(homes[0][0], modules[0], parameter)) is not None:
        return "matrix", f"{experts}{tied}"
    if isinstance(modules[0], RECURRENT) and parameter.ndim == 2:
        return "matrix", "recurrent kernel, which cannot be captured: identity maps"
    if sum(size > 1 for size in parameter.shape) < 2:
        kind = "bias" if homes[0][0].endswith("bias") else "vector"
        return "adamw", f"{kind} of {type(modules[0]).__name__}{tied}"
    hint = how_to_stack(homes[0][0], modules[0], parameter)
    return "adamw", f"{type(modules[0]).__name__} is not a linear layer{tied}{hint}"


def _output_head(model: nn.Module) -> nn.Module | None:
    """The linear layer that computes the logits: found by interface, by name, or by being last."""
    getter = getattr(model, "get_output_embeddings", None)
    if callable(getter) and isinstance(head := getter(), nn.Linear):
        return head
    linears = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    for name, module in reversed(linears):
        if name.rpartition(".")[2] in _HEAD_NAMES:
            return module
    if not linears or sum(rows_for(m, Sampling()) is not None for m in model.modules()) < 2:
        return None  # the only matrix must be the one to optimize
    name, module = linears[-1]
    # If the last layer is inside a numbered block (blocks.2.mlp.down), it is a hidden layer.
    in_block = any(part.isdigit() for part in name.split(".")[:-1])
    return None if in_block else module


def _override(
    routes: Routes, names: list[str]
) -> Callable[[str, nn.Module, nn.Parameter], Treatment | None]:
    if routes is None:
        return lambda name, module, parameter: None
    if callable(routes):
        return lambda name, module, parameter: _known(routes(name, module, parameter), name)
    if not isinstance(routes, Mapping):
        raise TypeError(f"routes must be a dict, a function or None, got {describe_value(routes)}")
    for pattern, treatment in routes.items():
        _known(treatment, pattern)
    chosen = dict(select(routes, names, "routes"))
    return lambda name, module, parameter: chosen.get(name)


def select(
    patterns: Mapping[str, Choice], names: list[str], keyword: str
) -> Iterator[tuple[str, Choice]]:
    """Each name that a pattern matches, with the value of the first matching pattern.

    Raises:
        TypeError: a pattern is not a string.
        ValueError: a pattern matches no name.
    """
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"{keyword} must have names as keys, got {describe_value(pattern)}")
        if not fnmatch.filter(names, pattern):
            near = difflib.get_close_matches(pattern, names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{keyword} has {pattern!r}, which matches no parameter{hint}")
    for name in names:
        for pattern, value in patterns.items():
            if fnmatch.fnmatchcase(name, pattern):
                yield name, value
                break


def _known(treatment: Treatment | None, name: str) -> Treatment | None:
    if treatment is not None and treatment not in get_args(Treatment):
        raise ValueError(
            f"routes gives {name!r} the treatment {treatment!r}; expected one of "
            f"{get_args(Treatment)}"
        )
    return treatment
