"""How parameters are cut into matrices: by their module and by the user's `specs`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from gomuon.errors import describe_value
from gomuon.parameters.experts import stacked_weights
from gomuon.parameters.routing import RECURRENT, RoutingTable, plain_name, select
from gomuon.parameters.rows import ConvRows, is_transposed_linear, own_parameter, rows_for
from gomuon.parameters.sampling import Sampling
from gomuon.parameters.sharding import is_sharded
from gomuon.parameters.side_forms import SideChoice, SideForm, choice_of, form_of
from gomuon.parameters.tensor_shards import INPUTS, OUTPUTS, TensorShard
from gomuon.parameters.tiling import Tiling

Group = Mapping[str, Any]


@dataclass(frozen=True)
class TensorBlock:
    """This rank's block of a parameter under tensor parallelism.

    Attributes:
        shape: its shape.
        copies: the number of ranks that have the same block.
    """

    shape: tuple[int, ...]
    copies: int


@dataclass(frozen=True)
class LayerSpec:
    """How a parameter is cut into matrices.

    Args:
        heads: the number of heads along the outputs (for a query, key or value). Each head is a
            matrix of its own.
        input_heads: the number of heads along the inputs (for an attention's output projection).
        parts: the number of layers fused along the outputs, each with `heads` heads: 3 for a fused
            qkv, or the groups of a convolution.
        block: the parameter's own `block_size`. Methods that capture moments cut the factors of
            both sides with it. All other methods cut the matrix itself, and each block is a matrix
            of its own; the last one is filled up with zeros, which do not change Gram matrices.
        transposed: the parameter is stored as inputs × outputs.
        partner: the weight that this weight is multiplied with (keys for queries), for geometries
            that use it.
        bias: a bias that joins the matrix as its last column. The inputs then end with a one.
        rows: for captured moments, the largest number of rows of a forward pass that enter them. It
            replaces the group's setting `rows`; None leaves it.
        outputs: how captured geometry treats the output side of each matrix. A number is the
            longest side of a block. "whole": it is never cut. "diagonal": only its diagonal is
            captured. "identity": nothing is captured. None: as `block`, `block_size` and `max_side`
            say.
        inputs: the same for the input side.
        ranks: which ranks have the parameter. "own": only this rank, as one of its experts; then it
            is neither compared with those of other ranks nor computed by them. "shared": all that
            train the model. None: this rank's own if DDP or `fully_shard` was told to ignore it.
        stack: the parameter is a stack of matrices, which its last two dimensions are; each is cut
            further by the other arguments. None: its module decides. A parameter with three
            dimensions is a stack, unless it is the kernel of a convolution or of `nn.Bilinear`.
        shard: the block that this rank has under tensor parallelism, which is then cut further.
            `parallelize_module` decides it, not the user.
    """

    heads: int = 1
    input_heads: int = 1
    parts: int = 1
    block: int | None = None
    transposed: bool = False
    partner: Tensor | None = None
    bias: Tensor | None = None
    rows: int | None = None
    outputs: SideChoice | None = None
    inputs: SideChoice | None = None
    ranks: str | None = None
    stack: bool | None = None
    shard: TensorBlock | None = None

    @property
    def row_blocks(self) -> int:
        """The number of equal blocks along the outputs."""
        return self.parts * self.heads

    @property
    def column_blocks(self) -> int:
        """The number of equal blocks along the inputs."""
        return self.input_heads

    def tiling(self, m: int, n: int, stack: int = 1) -> Tiling:
        """How matrices with the sides m and n are cut."""
        if self.block is None:
            rows, columns = self.row_blocks, self.column_blocks
            return Tiling(stack, rows, columns, m // rows, n // columns)
        high, wide = min(m, self.block), min(n, self.block)
        return Tiling(stack, -(-m // high), -(-n // wide), high, wide)

    def forms(self, m: int, n: int) -> tuple[SideForm, SideForm]:
        """The forms of the factors of each matrix, left and right."""
        high, wide = self.tiling(m, n).sides
        return form_of(high, self.outputs), form_of(wide, self.inputs)


DEFAULT_SPEC = LayerSpec()
# With rows="auto": rows for each input of a block of A, and the fewest, because even fewer would
# save little. A moment of fewer rows than inputs costs loss (docs/reproduction.md).
ROWS_PER_INPUT = 2
FEWEST_ROWS = 256
_FORMS = ("whole", "diagonal", "identity")
_RANKS = (None, "own", "shared")


def check_spec(name: str, parameter: Tensor, spec: LayerSpec) -> None:
    """Raise a ValueError if the blocks do not divide the parameter."""
    if not parameter.ndim:
        raise ValueError(f"{name!r} is a scalar and cannot be cut; leave it out of specs")
    if spec.stack and parameter.ndim < 3:
        raise ValueError(
            f"{name!r} has the shape {tuple(parameter.shape)}, which is no stack of matrices; "
            "leave stack out of its LayerSpec"
        )
    whole = isinstance(spec.rows, int) and not isinstance(spec.rows, bool)
    if spec.rows is not None and not (whole and spec.rows >= 1):
        raise ValueError(
            f"rows of {name!r} must be None or a whole number >= 1, got "
            f"{describe_value(spec.rows)}; change its LayerSpec"
        )
    if spec.ranks not in _RANKS:
        raise ValueError(
            f'ranks in the LayerSpec of {name!r} must be None, "own" or "shared", got '
            f"{describe_value(spec.ranks)}"
        )
    if spec.ranks == "own" and is_sharded(parameter):
        raise ValueError(
            f'{name!r} has ranks="own" in its LayerSpec, but it is a DTensor, and torch knows '
            "which ranks have it; leave ranks out, or keep this rank's part as a plain parameter"
        )
    m, n = matrix_sides(parameter, spec)
    for side, size, blocks in (("rows", m, spec.row_blocks), ("columns", n, spec.column_blocks)):
        if blocks < 1 or size % blocks:
            raise ValueError(
                f"{name!r} has {size} {side}, which {blocks} blocks do not divide; change its "
                "LayerSpec"
            )


def row_limit(spec: LayerSpec, group: Group, inputs: SideForm) -> int | None:
    """The largest number of rows of a forward pass that enter a layer's moments; None: all.

    "auto" goes by the side of A's blocks. A is not averaged over refreshes as B is, so it needs
    rows of its own; and layers that read one tensor get one number, so they can share its moment.

    Args:
        spec: the layer's.
        group: the settings of its group.
        inputs: the form of A.
    """
    rows: int | str | None = group.get("rows") if spec.rows is None else spec.rows
    if rows == "auto":
        return max(FEWEST_ROWS, ROWS_PER_INPUT * inputs.size if inputs.kind == "matrix" else 0)
    return None if rows is None else int(rows)


def matrix_sides(parameter: Tensor, spec: LayerSpec) -> tuple[int, int]:
    """The output side m and the input side n of the whole matrix, or of this rank's block.

    Of a stack, the sides of each of its matrices.
    """
    _, first, rest = stored_sides(own_shape(parameter, spec), spec)
    m, n = (rest, first) if spec.transposed else (first, rest)
    return m, n + (spec.bias is not None)


def stored_sides(shape: tuple[int, ...], spec: LayerSpec) -> tuple[int, int, int]:
    """How many matrices a parameter of this shape holds, and their sides as they are stored."""
    if spec.stack:
        return math.prod(shape[:-2]), shape[-2], shape[-1]
    return 1, shape[0], math.prod(shape[1:])


def own_shape(parameter: Tensor, spec: LayerSpec) -> tuple[int, ...]:
    """The shape of the parameter, or of this rank's block of it."""
    return tuple(parameter.shape) if spec.shard is None else spec.shard.shape


def with_shard(name: str, spec: LayerSpec, parameter: Tensor, shard: TensorShard) -> LayerSpec:
    """The spec of this rank's block, given that of the whole parameter.

    Raises:
        ValueError: blocks of the spec would be divided between ranks.
    """
    block = TensorBlock(shard.shape(parameter), shard.parts if shard.dim is None else 1)
    if shard.dim is None:
        return replace(spec, shard=block)
    if spec.stack and shard.dim == 0:  # each rank has some of the matrices, whole
        return replace(spec, shard=block)
    outputs = len(block.shape) - 2 if spec.stack else OUTPUTS
    along_outputs = shard.dim == (outputs + 1 if spec.transposed else outputs)
    blocks = spec.row_blocks if along_outputs else spec.column_blocks
    if blocks > 1 and blocks % shard.parts:
        said = f"heads={spec.heads}" if along_outputs else f"input_heads={spec.input_heads}"
        said = f"parts={spec.parts} with {said}" if along_outputs and spec.parts > 1 else said
        raise ValueError(
            f"{said} in the LayerSpec of {name!r} cannot be divided among {shard.parts} "
            'ranks; choose a number of ranks that divides it, or tensor_parallel="exact"'
        )
    here = max(1, blocks // shard.parts)
    if along_outputs:  # fused layers follow each other, so a rank has some of all their heads
        return replace(spec, parts=1, heads=here, shard=block)
    return replace(spec, input_heads=here, shard=block)


def joined_biases(
    model: nn.Module,
    table: RoutingTable,
    blocks: Mapping[Tensor, TensorShard] = MappingProxyType({}),
) -> RoutingTable:
    """Route biases like their weights, for recipes that join them to the weight as a column.

    Not that of a row-parallel layer whose blocks are matrices: every rank has a block of the
    weight's columns, but the same bias.
    """
    matrices = {
        route.parameter
        for route in table.treated("matrix")
        if route.parameter not in blocks or blocks[route.parameter].dim != INPUTS
    }
    joined = {
        bias
        for module in model.modules()
        if (bias := own_parameter(module, "bias")) is not None
        and own_parameter(module, "weight") in matrices
        and rows_for(module, Sampling()) is not None
        and getattr(module, "groups", 1) == 1
    }
    return RoutingTable(
        replace(r, treatment="matrix", reason="joins its weight as a column")
        if r.parameter in joined and r.treatment == "adamw"
        else r
        for r in table
    )


def module_specs(
    model: nn.Module, biases: set[Tensor], *, captured: bool = False
) -> dict[Tensor, LayerSpec]:
    """How weights are cut because of their module, such as a grouped convolution.

    `captured` says whether the method captures moments. Those of recurrent kernels cannot be.
    """
    specs: dict[Tensor, LayerSpec] = {}
    for module in model.modules():
        for parameter, transposed in stacked_weights(module):
            specs[parameter] = LayerSpec(stack=True, transposed=transposed)
        if captured and isinstance(module, RECURRENT):
            for parameter in module.parameters(recurse=False):
                specs[parameter] = LayerSpec(outputs="identity", inputs="identity")
        weight, bias = own_parameter(module, "weight"), own_parameter(module, "bias")
        rows = rows_for(module, Sampling())
        if rows is None or weight is None:
            continue
        specs[weight] = LayerSpec(
            parts=rows.groups if isinstance(rows, ConvRows) else 1,
            transposed=is_transposed_linear(module),
            bias=bias if bias is not None and bias in biases else None,
        )
    return specs


def layer_specs(
    model: nn.Module,
    biases: set[Tensor],
    patterns: Mapping[str, LayerSpec],
    *,
    captured: bool,
) -> dict[Tensor, LayerSpec]:
    """How parameters are cut into matrices: by module, then by the user's `specs`.

    Args:
        model: the model.
        biases: biases that join their weights.
        patterns: the user's `specs`.
        captured: whether the method captures moments.

    Raises:
        ValueError: a pattern matches no parameter, or a parameter cannot be cut this way.
    """
    specs = module_specs(model, biases, captured=captured)
    names = {plain_name(name): p for name, p in model.named_parameters()}
    for name, spec in select(patterns, list(names), "specs"):
        if not isinstance(spec, LayerSpec):
            raise TypeError(f"specs must have a LayerSpec for {name!r}, got {describe_value(spec)}")
        own = specs.get(names[name], DEFAULT_SPEC)
        blocks = spec.row_blocks, spec.column_blocks
        if own.parts > 1 and blocks not in ((1, 1), (own.parts, 1)):
            raise ValueError(
                f"{name!r} is a convolution with {own.parts} groups, each of them a matrix; it "
                f"cannot be cut into {blocks[0]} × {blocks[1]} blocks: leave it out of specs"
            )
        _check_sides(name, spec, captured=captured)
        if captured and spec.block is not None:  # the factors are cut, not the matrix
            outputs = spec.block if spec.outputs is None else spec.outputs
            inputs = spec.block if spec.inputs is None else spec.inputs
            spec = replace(spec, block=None, outputs=outputs, inputs=inputs)
        # The module decides how a weight is stored and which bias joins it, not the user.
        merged = replace(spec, transposed=own.transposed or spec.transposed, bias=own.bias)
        merged = replace(
            merged,
            stack=own.stack if spec.stack is None else spec.stack,
            outputs=own.outputs if spec.outputs is None else spec.outputs,
            inputs=own.inputs if spec.inputs is None else spec.inputs,
        )
        if own.parts > 1 and blocks == (1, 1):
            merged = replace(merged, parts=own.parts)
        check_spec(name, names[name], merged)
        specs[names[name]] = merged
    return specs


def _check_sides(name: str, spec: LayerSpec, *, captured: bool) -> None:
    """Raise a ValueError if `block`, `outputs` or `inputs` is wrong."""
    for key, forms in (("block", ()), ("outputs", _FORMS), ("inputs", _FORMS)):
        value = getattr(spec, key)
        if value is None:
            continue
        is_length = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        if not is_length and not (isinstance(value, str) and value in forms):
            choices = "".join(f', "{form}"' for form in forms)
            raise ValueError(
                f"{key} in the LayerSpec of {name!r} must be None, a whole number >= 1{choices}, "
                f"got {describe_value(value)}"
            )
        if key != "block" and not captured:
            raise ValueError(
                f"{key}={value!r} in the LayerSpec of {name!r} is for methods that capture "
                "moments, which this one does not; leave it out"
            )


def with_settings(spec: LayerSpec, parameter: Tensor, group: Group, *, captured: bool) -> LayerSpec:
    """The spec, with what the group's settings say about long sides.

    `captured` says whether the method captures moments. Then `block_size` cuts its factors,
    otherwise its matrices.
    """
    if not captured:
        return _with_block_size(spec, group)
    high, wide = spec.tiling(*matrix_sides(parameter, spec)).sides
    outputs, inputs = choice_of(high, spec.outputs, group), choice_of(wide, spec.inputs, group)
    return replace(spec, outputs=outputs, inputs=inputs)


def _with_block_size(spec: LayerSpec, group: Group) -> LayerSpec:
    """The spec, cut into blocks of the group's `block_size` if it has this setting."""
    size = group.get("block_size")
    whole = replace(spec, transposed=False, rows=None, ranks=None, stack=None, shard=None)
    is_uncut = whole == DEFAULT_SPEC
    return replace(spec, block=size) if size is not None and is_uncut else spec
