"""Which layers of a planned model tensor parallelism divides, as `parallelize_module` does it."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from gomuon.lab.errors import LabError
from gomuon.parameters.tensor_shards import INPUTS, OUTPUTS, TensorShard

DIVISIBLE = (nn.Linear, nn.Embedding)  # what parallelize_module can divide


@dataclass(frozen=True)
class TensorPlan:
    """The layers that are divided, by patterns of their modules' names.

    Attributes:
        colwise: those whose outputs are divided (`ColwiseParallel`).
        rowwise: those whose inputs are divided (`RowwiseParallel`); of an embedding, its symbols.
        heads: the ranks must divide this number of heads; None if that is not known.
        shares_inputs: layers that read one tensor are given one DTensor (`PrepareModuleInput`), so
            they share its sum. Otherwise each makes a DTensor of its own.
    """

    colwise: tuple[str, ...] = ()
    rowwise: tuple[str, ...] = ()
    heads: int | None = None
    shares_inputs: bool = False


@dataclass(frozen=True)
class PlannedMesh:
    """The ranks that divide layers, as far as a plan knows them."""

    parts: int

    def size(self) -> int:
        return self.parts


def place_parameters(
    name: str, model: nn.Module, plan: TensorPlan, parts: int
) -> dict[Tensor, TensorShard]:
    """The place of every parameter of a model.

    Raises:
        LabError: a pattern matches nothing, or the ranks cannot divide a layer.
    """
    if plan.heads is not None and plan.heads % parts:
        raise LabError(
            f"--tensor-parallel {parts} does not divide the {plan.heads} heads of {name!r}; choose "
            f"one of {', '.join(str(n) for n in range(2, plan.heads + 1) if plan.heads % n == 0)}"
        )
    mesh = PlannedMesh(parts)
    names: dict[Tensor, str] = {parameter: own for own, parameter in model.named_parameters()}
    places = {parameter: TensorShard(mesh) for parameter in names}
    for layer, parameter, dim in _cuts(name, model, plan):
        if parameter.shape[dim] % parts:
            raise LabError(
                f"--tensor-parallel {parts} does not divide dimension {dim} of "
                f"{names[parameter]!r}, {tuple(parameter.shape)}; choose another number of ranks, "
                f"or patterns without {layer!r}"
            )
        if places[parameter].dim not in (None, dim):
            raise LabError(
                f"{names[parameter]!r} would be divided in two ways, along its dimensions "
                f"{places[parameter].dim} and {dim}; give {layer!r} to one of --colwise and "
                "--rowwise"
            )
        places[parameter] = TensorShard(mesh, dim)
    return places


def _cuts(name: str, model: nn.Module, plan: TensorPlan) -> Iterator[tuple[str, Tensor, int]]:
    """Every parameter that is divided: its module's name, and the dimension that is cut."""
    for layer, style in divided_layers(name, model, plan).items():
        module = model.get_submodule(layer)
        is_linear = isinstance(module, nn.Linear)
        dim = OUTPUTS if (style == "colwise") == is_linear else INPUTS
        yield layer, module.get_parameter("weight"), dim
        if is_linear and style == "colwise" and module.bias is not None:
            yield layer, module.get_parameter("bias"), OUTPUTS


def divided_layers(name: str, model: nn.Module, plan: TensorPlan) -> dict[str, str]:
    """The names of the layers that are divided, and how: "colwise" or "rowwise"."""
    layers = [own for own, part in model.named_modules() if isinstance(part, DIVISIBLE)]
    found: dict[str, str] = {}
    for style, patterns in (("colwise", plan.colwise), ("rowwise", plan.rowwise)):
        for pattern in patterns:
            matched = fnmatch.filter(layers, pattern)
            if not matched:
                near = difflib.get_close_matches(pattern, layers, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise LabError(
                    f"--{style} {pattern!r} matches no linear layer or embedding of {name!r}{hint}"
                )
            for layer in matched:
                if found.setdefault(layer, style) != style:
                    raise LabError(f"--colwise and --rowwise both match {layer!r} of {name!r}")
    return found


def divided_flops(own: Mapping[str, float], layers: Collection[str], parts: int) -> float:
    """FLOPs of a forward pass that are left to each rank.

    What a module multiplies itself, beside its layers, is divided if some of them are: attention
    has a part of the heads, because its queries, keys and values are divided.

    Args:
        own: FLOPs of every module without those of the modules in it, by name.
        layers: the names of the layers that are divided.
        parts: the number of ranks.
    """
    divided = {*layers, *(layer.rpartition(".")[0] for layer in layers)}
    return sum(flops / (parts if name in divided else 1) for name, flops in own.items())
