"""How parameters are cut into matrices: by their module, and as a user's `specs` say."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from gomuon.errors import shown
from gomuon.parameters.routing import Route, RoutingTable, plain_name, select
from gomuon.parameters.rows import ConvRows, Sampling, is_transposed_linear, rows_for

Group = Mapping[str, Any]


@dataclass(frozen=True)
class LayerSpec:
    """How a parameter is cut into matrices.

    Args:
        heads: heads along the outputs, each a matrix of its own: of a query, key or value.
        input_heads: heads along the inputs: of an attention's output projection.
        parts: layers fused along the outputs, each with that many heads: 3 for a qkv, or the groups
            of a convolution.
        block: instead of a number of blocks, the largest side of one; what is left over at the end
            is filled up with zeros, which no Gram matrix notices.
        transposed: the parameter is stored inputs × outputs.
        partner: the weight this one is multiplied with (queries with keys), for geometries made
            of it.
        bias: a bias that joins the matrix as its last column, with inputs extended by a one.
    """

    heads: int = 1
    input_heads: int = 1
    parts: int = 1
    block: int | None = None
    transposed: bool = False
    partner: Tensor | None = None
    bias: Tensor | None = None

    @property
    def rows(self) -> int:
        """Equal blocks along the outputs."""
        return self.parts * self.heads

    @property
    def columns(self) -> int:
        """Equal blocks along the inputs."""
        return self.input_heads

    def tiling(self, m: int, n: int) -> tuple[int, int, int, int]:
        """Blocks along rows and columns, and the two sides of one."""
        if self.block is None:
            return self.rows, self.columns, m // self.rows, n // self.columns
        high, wide = min(m, self.block), min(n, self.block)
        return -(-m // high), -(-n // wide), high, wide


PLAIN = LayerSpec()


def check_spec(name: str, parameter: Tensor, spec: LayerSpec) -> None:
    """Raise a ValueError when the blocks do not divide the parameter."""
    if not parameter.ndim:
        raise ValueError(f"{name!r} is a single number, which cannot be cut; leave it out of specs")
    m, n = matrix_sides(parameter, spec)
    for side, size, blocks in (("rows", m, spec.rows), ("columns", n, spec.columns)):
        if blocks < 1 or size % blocks:
            raise ValueError(f"{blocks} blocks do not divide the {size} {side} of {name!r}")


def matrix_sides(parameter: Tensor, spec: LayerSpec) -> tuple[int, int]:
    """Output and input side of the whole matrix."""
    first = parameter.shape[0]
    rest = parameter.numel() // first
    m, n = (rest, first) if spec.transposed else (first, rest)
    return m, n + (spec.bias is not None)


def joined_biases(model: nn.Module, table: RoutingTable) -> RoutingTable:
    """Route biases of matrices with their weights, for recipes that append them as a column."""
    matrices = {route.parameter for route in table.treated("matrix")}
    joined = {
        module.bias
        for module in model.modules()
        if isinstance(getattr(module, "bias", None), nn.Parameter)
        and getattr(module, "weight", None) in matrices
        and rows_for(module, Sampling()) is not None
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
        rows = rows_for(module, Sampling())
        if rows is None or not isinstance(weight, Tensor):
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


def cut(spec: LayerSpec, group: Group) -> LayerSpec:
    """Sides above `block_size` in pieces of that size, where a group has one."""
    size = group.get("block_size")
    plain = replace(spec, transposed=False) == PLAIN
    return replace(spec, block=size) if size is not None and plain else spec
