"""A model's matrices as shapes, and which layers read the same input."""

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from gomuon.capture.hooks import CapturedModule
from gomuon.capture.modules import captured_modules
from gomuon.distributed.assignment import TensorPart
from gomuon.lab.costs.input_uses import InputUse, InputUses, whole_rows
from gomuon.parameters.layers import Layer
from gomuon.parameters.layout import Layout
from gomuon.parameters.routing import Routes, RoutingTable
from gomuon.parameters.rows import ConvRows
from gomuon.parameters.sampling import Sampling
from gomuon.parameters.side_forms import LEFT, RIGHT, SideForm
from gomuon.parameters.specs import (
    DEFAULT_SPEC,
    LayerSpec,
    layer_specs,
    matrix_sides,
    row_limit,
    with_settings,
    with_shard,
)
from gomuon.parameters.tensor_shards import INPUTS, OUTPUTS
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
        tensors: the parameter, and a bias that joins it.
        rows: blocks along the outputs.
        columns: blocks along the inputs.
        matrices: the blocks.
        reads: equal for layers that read the same tensors; None if nothing is captured.
        grouped: moments come one per block of rows, as a grouped convolution's do.
        uses: rows that the weight is applied to in one forward pass; examples, if they are reduced.
            Of a stack, those of all its matrices.
        limit: the largest number of rows that enter the moments at each call of the layer.
        calls: how often the layer is called in one forward pass. Of a stack, each matrix counts.
        copies: how many of these calls read the very same rows.
        in_sequences: whether the rows are positions of sequences.
        stack: how many matrices have a number of rows of their own.
        by_function: functions multiply with the weight, not a module.
        cut: the side along which ranks divide the whole matrix, if its owner gathers it.
    """

    name: str
    group: int
    settings: Group
    tensors: tuple[TensorPart, ...]
    rows: int
    columns: int
    matrices: Matrices
    reads: Hashable | None = None
    grouped: bool = False
    uses: int = 1
    limit: int | None = None
    calls: int = 1
    copies: int = 1
    in_sequences: bool = True
    stack: int = 1
    by_function: bool = False
    cut: int | None = None

    def sampled_rows(self, passes: float, where: int = LEFT) -> int:
        """Rows that enter a side's moment in so many forward passes, taken as one pass of all.

        Of a stack, those of all its matrices; each of them has an equal share.
        """
        # To a row in each sequence; of an example that is reduced to one row, no row is left out.
        strides = self.in_sequences and not self.settings.get("reduce")
        stride = self.settings.get("token_stride", 1) if strides else 1
        rows = round(self.uses * passes / stride / self.copies_of(where))
        return rows if self.limit is None else min(rows, self.limit * self.calls_of(where))

    def calls_of(self, where: int) -> int:
        """How many lots of rows these are."""
        return self.calls // self.copies_of(where)

    def copies_of(self, where: int) -> int:
        return self.copies if where == RIGHT else 1

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
class ModelLayers:
    """The routing of a model, its matrices, and AdamW's parameters."""

    table: RoutingTable
    layers: tuple[MatrixLayer, ...]
    others: tuple[TensorPart, ...]


def find_layers(
    model: nn.Module,
    recipe: Recipe,
    settings: Group,
    uses: InputUses | None = None,
    routes: Routes = None,
    specs: Mapping[str, LayerSpec] | None = None,
    layout: Layout | None = None,
) -> ModelLayers:
    """What a method finds in a model, which may be on the meta device.

    Args:
        model: its parameters are routed and cut as the optimizer would.
        recipe: the method's.
        settings: the constructor's, all of them.
        uses: what `find_input_uses` found; without it no two layers share an input.
        routes: as the optimizer's.
        specs: as the optimizer's.
        layout: how tensor parallelism divides the model.
    """
    layout = Layout() if layout is None else layout
    table = routed(recipe, model, layout, routes)
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
    for name, block in model.named_parameters():
        if (place := layout.blocks.get(block)) is not None:
            cuts[block] = with_shard(name, cuts.get(block, DEFAULT_SPEC), block, place)
    joined = {spec.bias for spec in cuts.values()}

    def sampling(weight: Tensor) -> Sampling:
        spec = cuts.get(weight, DEFAULT_SPEC)
        cut = with_settings(spec, weight, settings, captured=recipe.geometry.uses_moments)
        inputs = cut.forms(*matrix_sides(weight, cut))[RIGHT]
        rows = row_limit(spec, settings, inputs)
        return Sampling(ones=spec.bias is not None, rows=rows)

    hooked = captured_modules(model, sampling, cuts)
    layers = []
    for number, (group, name, parameter, own) in enumerate(_grouped(recipe, table, settings)):
        if parameter in joined or parameter.numel() == 0:
            continue
        spec = cuts.get(parameter, DEFAULT_SPEC)
        spec = with_settings(spec, parameter, own, captured=recipe.geometry.uses_moments)
        layer = _matrix_layer((group, name), parameter, spec, own, layout)
        seen = InputUse(number) if uses is None else uses.get(parameter)
        if seen is not None:
            captured = recipe.geometry.captured_sides(own)
            limit = sampling(parameter).rows
            layer = _captured(layer, captured, seen, limit, hooked.get(parameter, ()))
        layers.append(layer)
    others = tuple(part_of(entry.parameter, layout) for entry in table.treated("adamw"))
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
    place: tuple[int, str], parameter: Tensor, spec: LayerSpec, settings: Group, layout: Layout
) -> MatrixLayer:
    """The layer of a parameter, given its group's number and its name; nothing is captured yet."""
    group, name = place
    layer = Layer(name, parameter, {}, spec)
    tensors = (parameter,) if spec.bias is None else (parameter, spec.bias)
    matrices = Matrices(
        layer.blocks,
        *layer.shape,
        float64=parameter.dtype == torch.float64,
        forms=layer.forms,
        has_partner=spec.partner is not None,
    )
    gathered = layout.gathered.get(parameter)
    dim = None if gathered is None else gathered.dim
    return MatrixLayer(
        name,
        group,
        settings,
        tuple(part_of(tensor, layout) for tensor in tensors),
        *layer.tiling.strips,
        matrices,
        stack=layer.tiling.stack,
        cut=None if dim is None else {OUTPUTS: LEFT, INPUTS: RIGHT}[dim],
    )


def _captured(
    layer: MatrixLayer,
    captured: tuple[bool, bool],
    seen: InputUse,
    limit: int | None,
    modules: Sequence[CapturedModule],
) -> MatrixLayer:
    """The layer as it is captured: by hooks on its `modules`, or if there are none, by products.

    Args:
        layer: the layer.
        captured: whether the method captures (left, right).
        seen: what the layer reads.
        limit: the largest number of rows.
        modules: those that multiply with its weight.
    """
    forms = (layer.matrices.form(where) for where in (LEFT, RIGHT))
    gradients, inputs = (
        side and form.kind != "identity" for side, form in zip(captured, forms, strict=True)
    )
    if not (gradients or inputs):
        return layer
    rows = [whole_rows(module.rows) for module in modules]
    # Whoever reads one tensor in two ways, or cuts it in two ways, takes two moments of it.
    ways = tuple(rows), layer.columns, layer.matrices.form(RIGHT)
    return replace(
        layer,
        matrices=replace(layer.matrices, captured=(gradients, inputs)),
        reads=(seen.what, ways) if rows else ("product", layer.name),
        grouped=bool(rows) and isinstance(rows[0], ConvRows) and rows[0].groups > 1,
        uses=seen.examples if layer.settings.get("reduce") else seen.rows,
        limit=limit,
        calls=seen.calls,
        copies=seen.copies,
        in_sequences=seen.in_sequences,
        by_function=not rows,
    )


def part_of(parameter: Tensor, layout: Layout) -> TensorPart:
    """What a rank has of a parameter before sharding along its first dimension cuts it."""
    place = layout.shards.get(parameter)
    shape = tuple(parameter.shape) if place is None else place.shape(parameter)
    parts = 1 if place is None or place.dim is None or not layout.gathers else place.parts
    return TensorPart(shape[0] if shape else 1, math.prod(shape[1:]), parts)
