"""A model's matrices as shapes, and which layers read the same input."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from gomuon.capture.hooks import CapturedModule
from gomuon.capture.modules import captured_modules
from gomuon.parameters.divided_rows import CapturedRows, DividedRows
from gomuon.parameters.layers import Layer
from gomuon.parameters.layout import Layout
from gomuon.parameters.routing import Routes, RoutingTable
from gomuon.parameters.rows import ConvRows, Rows
from gomuon.parameters.sampling import Sampling
from gomuon.parameters.side_forms import LEFT, RIGHT, SideForm
from gomuon.parameters.specs import (
    DEFAULT_SPEC,
    LayerSpec,
    layer_specs,
    matrix_sides,
    row_limit,
    with_settings,
)
from gomuon.recipes.model_groups import routed
from gomuon.recipes.recipe import Recipe
from gomuon.recipes.work import Group, Matrices


@dataclass(frozen=True)
class SideFactors:
    """The captured factors of one side, and the sums they are made of.

    Attributes:
        strips: the number of factors, each for some of the layer's matrices.
        form: the form of each of them.
    """

    strips: int
    form: SideForm

    @property
    def squares(self) -> tuple[int, int]:
        """(count, side) of the square matrices that they consist of; a diagonal has none."""
        return self.strips * self.form.blocks * (self.form.kind == "matrix"), self.form.size

    @property
    def elements(self) -> int:
        return self.elements_of(lambda d: d * d)

    @property
    def sent(self) -> int:
        """Numbers that are sent for the sums: one triangle of each square."""
        return self.elements_of(lambda d: d * (d + 1) // 2)

    def elements_of(self, square: Callable[[int], int]) -> int:
        """Numbers in something of this form, given those in a square of side d."""
        each = self.form.blocks * square(self.form.size)
        return self.strips * (self.form.side if self.form.kind == "diagonal" else each)


@dataclass(frozen=True)
class MatrixLayer:
    """What the costs of a matrix parameter depend on.

    Attributes:
        name: the parameter's.
        group: the number of its parameter group.
        settings: the settings of its group.
        tensors: (rows, elements in a row) of the parameter and of a bias that joins it.
        rows: blocks along the outputs.
        columns: blocks along the inputs.
        matrices: the blocks.
        reads: equal for layers that read the same tensors; None if nothing is captured.
        grouped: moments come one per block of rows, as a grouped convolution's do.
        uses: rows that the weight is applied to in one forward pass; examples, if they are reduced.
        limit: the largest number of rows that enter the moments at each call of the layer.
        calls: how often the layer is called in one forward pass.
    """

    name: str
    group: int
    settings: Group
    tensors: tuple[tuple[int, int], ...]
    rows: int
    columns: int
    matrices: Matrices
    reads: Hashable | None = None
    grouped: bool = False
    uses: int = 1
    limit: int | None = None
    calls: int = 1

    def sampled_rows(self, passes: float) -> int:
        """Rows that enter the moments in so many forward passes, taken as one pass of them all."""
        # To a row in each sequence; of an example that is reduced to one row, no row is left out.
        stride = 1 if self.settings.get("reduce") else self.settings.get("token_stride", 1)
        rows = round(self.uses * passes / stride)
        return rows if self.limit is None else min(rows, self.limit * self.calls)

    @property
    def factors(self) -> tuple[SideFactors, SideFactors]:
        """The captured factors, left and right."""
        right_strips = self.rows if self.grouped else self.columns
        left, right = (self.matrices.form(where) for where in (LEFT, RIGHT))
        return SideFactors(self.rows, left), SideFactors(right_strips, right)


def units_of(layers: Sequence[MatrixLayer]) -> list[list[MatrixLayer]]:
    """Layers that share captured inputs together, every other one alone."""
    units: dict[Hashable, list[MatrixLayer]] = {}
    for index, layer in enumerate(layers):
        units.setdefault(("alone", index) if layer.reads is None else layer.reads, []).append(layer)
    return list(units.values())


# ---- what a method finds in a model --------------------------------------------------------------


@dataclass(frozen=True)
class InputUse:
    """What a weight read in one forward pass.

    Attributes:
        what: equal for layers that read the same tensors.
        rows: how many it read.
        examples: how many examples these belong to.
        calls: how often it was called.
    """

    what: Hashable
    rows: int = 1
    examples: int = 1
    calls: int = 1


InputUses = Mapping[Tensor, InputUse]


@dataclass(frozen=True)
class ModelLayers:
    """The routing of a model, its matrices, and (rows, elements in a row) of AdamW's parameters."""

    table: RoutingTable
    layers: tuple[MatrixLayer, ...]
    others: tuple[tuple[int, int], ...]


def find_layers(
    model: nn.Module,
    recipe: Recipe,
    settings: Group,
    uses: InputUses | None = None,
    routes: Routes = None,
    specs: Mapping[str, LayerSpec] | None = None,
) -> ModelLayers:
    """What a method finds in a model, which may be on the meta device.

    Args:
        model: its parameters are routed and cut as the optimizer would.
        recipe: the method's.
        settings: the constructor's, all of them.
        uses: what `find_input_uses` found; without it no two layers share an input.
        routes: as the optimizer's.
        specs: as the optimizer's.
    """
    table = routed(recipe, model, Layout(), routes)
    matrices = {entry.parameter for entry in table.treated("matrix")}
    cuts = {
        **layer_specs(
            model,
            matrices if recipe.joins_bias else set(),
            specs or {},
            captured=recipe.geometry.uses_moments,
        ),
        **recipe.model_use.specs(model, settings),
    }
    joined = {spec.bias for spec in cuts.values()}

    def sampling(weight: Tensor) -> Sampling:
        spec = cuts.get(weight, DEFAULT_SPEC)
        cut = with_settings(spec, weight, settings, captured=recipe.geometry.uses_moments)
        inputs = cut.forms(*matrix_sides(weight, cut))[RIGHT]
        rows = row_limit(spec, settings, inputs)
        return Sampling(ones=spec.bias is not None, rows=rows)

    watched = captured_modules(model, sampling)
    layers = []
    for number, (group, name, parameter, own) in enumerate(_grouped(recipe, table, settings)):
        if parameter in joined or parameter.numel() == 0:
            continue
        spec = cuts.get(parameter, DEFAULT_SPEC)
        spec = with_settings(spec, parameter, own, captured=recipe.geometry.uses_moments)
        modules = watched.get(parameter, ())
        seen = InputUse(number) if uses is None else uses.get(parameter)
        captured = recipe.geometry.captured_sides(own)
        layers.append(_matrix_layer((group, name), parameter, spec, own, captured, modules, seen))
    others = tuple(_rows(entry.parameter) for entry in table.treated("adamw"))
    return ModelLayers(table, tuple(layers), others)


def _grouped(
    recipe: Recipe, table: RoutingTable, settings: Group
) -> Iterator[tuple[int, str, Tensor, dict[str, Any]]]:
    """Every matrix parameter, with its group's number and settings."""
    for number, group in enumerate(recipe.model_use.groups(table, settings)):
        changes = {key: value for key, value in group.items() if key not in ("params", "treatment")}
        if group["treatment"] == "matrix":
            for name, parameter in group["params"]:
                yield number, name, parameter, {**settings, **changes}


def _matrix_layer(
    place: tuple[int, str],
    parameter: Tensor,
    spec: LayerSpec,
    settings: Group,
    captured: tuple[bool, bool],
    modules: Sequence[CapturedModule],
    seen: InputUse | None,
) -> MatrixLayer:
    """The layer of a parameter, given its group's number, its name and what it read."""
    group, name = place
    layer = Layer(name, parameter, {}, spec)
    strips = layer.tiling.strips
    tensors = tuple(_rows(tensor) for tensor in (parameter, spec.bias) if tensor is not None)
    matrices = Matrices(
        layer.blocks,
        *layer.shape,
        float64=parameter.dtype == torch.float64,
        forms=layer.forms,
        has_partner=spec.partner is not None,
    )
    found = MatrixLayer(name, group, settings, tensors, *strips, matrices)
    gradients, inputs = (
        side and form.kind != "identity" for side, form in zip(captured, layer.forms, strict=True)
    )
    if seen is None or not modules or not (gradients or inputs):
        return found
    return replace(
        found,
        matrices=replace(matrices, captured=(gradients, inputs)),
        # Whoever reads one tensor in two ways, or cuts it in two ways, takes two moments of it.
        reads=(seen.what, tuple(module.rows for module in modules), strips[1], layer.forms[1]),
        grouped=isinstance(modules[0].rows, ConvRows) and spec.parts > 1,
        uses=seen.examples if settings.get("reduce") else seen.rows,
        limit=_whole(modules[0].rows).sampling.rows,
        calls=seen.calls,
    )


def _whole(rows: CapturedRows) -> Rows:
    """The rows of a layer of a planned model, which is not divided among ranks."""
    assert not isinstance(rows, DividedRows)
    return rows


def find_input_uses(model: nn.Module, *inputs: Tensor) -> dict[Tensor, InputUse]:
    """Weights and what they read in one forward pass, by identity, as the capture finds it.

    On the meta device this costs no memory. A weight that was never called is left out.
    """
    alive: list[Tensor] = []  # a dead tensor's id may come again
    calls: dict[Tensor, list[tuple[int, int]]] = {}
    uses: dict[Tensor, tuple[int, int]] = {}
    handles = []
    for weight, modules in captured_modules(model, lambda weight: Sampling()).items():
        for watched in modules:
            rows_read = _whole(watched.rows)

            def note(
                module: nn.Module,
                args: tuple[Any, ...],
                kwargs: dict[str, Any],
                output: Tensor,
                weight: Tensor = weight,
                reader: Rows = rows_read,
            ) -> None:
                x: Tensor = args[0] if args else kwargs["input"]
                alive.append(x)
                calls.setdefault(weight, []).append((id(x), x._version))
                rows, examples = uses.get(weight, (0, 0))
                reduced = replace(reader, sampling=Sampling(reduce=True))
                uses[weight] = rows + reader.uses(output), examples + reduced.uses(output)

            handles.append(watched.module.register_forward_hook(note, with_kwargs=True))
    try:
        with torch.no_grad():
            model(*inputs)
    finally:
        for handle in handles:
            handle.remove()
    numbers: dict[tuple[tuple[int, int], ...], int] = {}
    return {
        weight: InputUse(numbers.setdefault(tuple(seen), len(numbers)), *uses[weight], len(seen))
        for weight, seen in calls.items()
    }


def _rows(parameter: Tensor) -> tuple[int, int]:
    """(rows, elements in a row), as sharding along the first dimension cuts a parameter."""
    rows = parameter.shape[0] if parameter.ndim else 1
    return rows, parameter.numel() // rows if rows else 0
