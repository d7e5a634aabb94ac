"""Decides the treatment of each parameter of a model, with the reason."""

import difflib
import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn

from gomuon.errors import describe_value
from gomuon.parameters.experts import how_to_stack, why_stack
from gomuon.parameters.heads import Heads, heads_by_rule
from gomuon.parameters.rows import Convolution, ConvRows, rows_for
from gomuon.parameters.sampling import Sampling
from gomuon.parameters.sharding import is_sharded, why_not_supported
from gomuon.parameters.shares import shares
from gomuon.parameters.tensor_shards import tensor_shards
from gomuon.parameters.traced_heads import traced_heads

Choice = TypeVar("Choice")
Treatment = Literal["matrix", "adamw", "frozen"]
Routes = Mapping[str, Treatment] | Callable[[str, nn.Module, nn.Parameter], Treatment | None] | None
Kind = Literal["embedding", "head", "vector", "other"]

# Their kernels multiply inside of one operation, so nothing can be captured.
RECURRENT = (nn.RNNBase, nn.RNNCellBase)


@dataclass(frozen=True)
class Route:
    """A parameter, its treatment, and the reason.

    `geometry` says which factors a matrix has (outputs × inputs), if its method captures moments.
    `kind` says what the parameter is in the model, whatever its treatment.
    """

    name: str
    parameter: Tensor
    treatment: Treatment
    reason: str
    geometry: str = ""
    kind: Kind = "other"

    @property
    def is_frozen(self) -> bool:
        """Whether it is not trained, at present."""
        return self.treatment == "frozen" or not self.parameter.requires_grad

    @property
    def cells(self) -> tuple[str, str]:
        """Treatment and reason, as the table shows them."""
        if self.treatment == "frozen" or not self.is_frozen:
            return self.treatment, self.reason
        return "frozen", f"requires_grad=False; {self.treatment} when trained: {self.reason}"


class RoutingTable(tuple[Route, ...]):
    """The routes of a model, in the order of its parameters. Prints as a table.

    `note` is a further line.
    """

    note: str = ""

    def treated(self, treatment: Treatment) -> list[Route]:
        return [route for route in self if route.treatment == treatment]

    def with_geometry(self, geometry: Mapping[Tensor, str]) -> "RoutingTable":
        """The table, with the geometry of matrices by parameter."""
        table = (replace(r, geometry=geometry.get(r.parameter, "")) for r in self)
        return RoutingTable(table).with_note(self.note)

    def with_note(self, note: str) -> "RoutingTable":
        """The same table; with this line at the end, if it is not empty."""
        self.note = note
        return self

    def __str__(self) -> str:
        columns: dict[str, list[str]] = {
            "parameter": [r.name for r in self],
            "shape": ["×".join(map(str, r.parameter.shape)) or "scalar" for r in self],
            "treatment": [r.cells[0] for r in self],
            "geometry": [r.geometry for r in self],
            "reason": [r.cells[1] for r in self],
        }
        if not any(columns["geometry"]):
            del columns["geometry"]
        table = [tuple(columns), *zip(*columns.values(), strict=True)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in table
        ]
        return "\n".join([*lines, *filter(None, [shares(self), self.note])])


def route(
    model: nn.Module, routes: Routes = None, example_input: Any = None, *, gathers: bool = False
) -> RoutingTable:
    """Give every parameter of `model` a treatment.

    Args:
        model: the model to train.
        routes: overrides. Either a dict from glob patterns of parameter names to treatments, or a
            function of (name, module, parameter) that returns a treatment or None.
        example_input: what the model is called with, to find its output heads; None: by rules.
        gathers: whether whole matrices are gathered under tensor parallelism.

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
    heads = heads_by_rule(model) if example_input is None else traced_heads(model, example_input)
    table = []
    for parameter, homes in owners.items():
        name, module = homes[0]
        treatment, reason = override(name, module, parameter), "set by routes"
        if treatment != "frozen":
            check_trainable(name, parameter, divided=parameter in shards)
        kind = kind_of(name, parameter, [module for _, module in homes], heads)
        if treatment is None:
            treatment, reason = _treatment(parameter, homes, heads)
        if parameter in shards and (place := shards[parameter].describe(gathered=gathers)):
            reason = f"{reason}; {place}"
        table.append(Route(name, parameter, treatment, reason, kind=kind))
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


def kind_of(
    name: str,
    parameter: Tensor,
    modules: Sequence[nn.Module] = (),
    heads: Heads = MappingProxyType({}),
) -> Kind:
    """What a parameter of these modules is in the model."""
    if any(isinstance(module, (nn.Embedding, nn.EmbeddingBag)) for module in modules):
        return "embedding"
    if parameter.ndim >= 2 and any(module in heads for module in modules):
        return "head"
    if sum(size > 1 for size in parameter.shape) < 2:
        return "vector"
    # A parameter with positions or the like, of no module of its own.
    is_bare = not any(rows_for(module, Sampling()) for module in modules)
    own = name.rpartition(".")[2]
    return "embedding" if is_bare and ("embed" in own or "position" in own) else "other"


def _treatment(
    parameter: nn.Parameter, homes: list[tuple[str, nn.Module]], heads: Heads
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
    if any(_is_original(name, module) for name, module in homes):
        return "adamw", f"a weight is computed from it, as weight_norm does{tied}"
    rows = [rows_for(module, Sampling()) for module in modules]
    if all(rows) and parameter.ndim >= 2:
        why = next((heads[module] for module in modules if module in heads), None)
        if why is not None:
            return "adamw", f"output head ({why}){tied}"
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
    return "adamw", f"{_why_no_matrix(modules[0])}{tied}{hint}"


def _is_original(name: str, module: nn.Module) -> bool:
    """Whether torch's old weight_norm or spectral_norm computes a weight from this parameter."""
    own = name.rpartition(".")[2]
    made = next((own.removesuffix(end) for end in ("_orig", "_g", "_v") if own.endswith(end)), None)
    return made is not None and made not in module._parameters and hasattr(module, made)


def _why_no_matrix(module: nn.Module) -> str:
    if isinstance(module, Convolution):  # otherwise it would be one
        return f"convolution with padding_mode={module.padding_mode!r}, which cannot be captured"
    if isinstance(module, (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)):
        return "transposed convolution, which cannot be captured"
    return f"{type(module).__name__} is not a linear layer"


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
