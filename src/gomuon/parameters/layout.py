"""The layout of an optimizer's parameters: how they are routed and cut into matrices."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from gomuon.parameters.groups import is_matrix, named
from gomuon.parameters.routing import RoutingTable
from gomuon.parameters.specs import DEFAULT_SPEC, LayerSpec, with_block_size
from gomuon.parameters.stacks import Layer, move_state_with
from gomuon.parameters.state import Cut

Group = Mapping[str, Any]
State = Mapping[Tensor, dict[str, Any]]


@dataclass(frozen=True)
class MatrixParameter:
    """A matrix parameter that is updated in a step."""

    name: str
    parameter: Tensor
    state: dict[str, Any]
    spec: LayerSpec
    phase: float = 0.0

    @property
    def layer(self) -> Layer:
        """The layer, for a rank that has the whole parameter."""
        return Layer(self.name, self.parameter, self.state, self.spec, self.phase)


@dataclass
class Layout:
    """How parameters are routed and cut.

    Attributes:
        patterns: the user's `specs`.
        table: the routing of the model's parameters.
        specs: how parameters are cut, if not as one matrix.
        phases: for staggered layers, the fraction of the interval by which they refresh later.
    """

    patterns: Mapping[str, LayerSpec] = field(default_factory=dict)
    table: RoutingTable = field(default_factory=RoutingTable)
    specs: dict[Tensor, LayerSpec] = field(default_factory=dict)
    phases: dict[Tensor, float] = field(default_factory=dict)

    def spec_of(self, parameter: Tensor, group: Group) -> LayerSpec:
        """How a parameter is cut in a group with these settings."""
        return with_block_size(self.specs.get(parameter, DEFAULT_SPEC), group)

    def divided(
        self, index: int, group: Group, state: State
    ) -> tuple[list[MatrixParameter], list[tuple[Tensor, dict[str, Any]]]]:
        """A group's parameters with gradients: matrices, and AdamW parameters with their states."""
        matrices: list[MatrixParameter] = []
        others: list[tuple[Tensor, dict[str, Any]]] = []
        joined = {spec.bias for weight, spec in self.specs.items() if weight.grad is not None}
        for name, parameter in named(group, index):
            if parameter.grad is None or not parameter.numel() or parameter in joined:
                continue
            entries = state[parameter]
            if is_matrix(group, parameter):
                spec, phase = self.spec_of(parameter, group), self.phases.get(parameter, 0.0)
                matrices.append(MatrixParameter(name, parameter, entries, spec, phase))
            else:
                move_state_with(parameter, entries)
                others.append((parameter, entries))
        return matrices, others

    def cut_of(self, parameter: Tensor, group: Group, *, known: bool) -> Cut:
        """How a parameter is cut, to check its state. `known` says that its model is attached."""
        if not parameter.ndim or not parameter.numel():
            return Cut(frozenset(), (0, 0, 0, 0))  # no matrix
        layer = Layer("", parameter, {}, self.spec_of(parameter, group))
        own = {tuple(parameter.shape)} if layer.is_reshape else set()
        tiling = (layer.rows, layer.columns, *layer.shape)
        return Cut(frozenset({(layer.blocks, *layer.shape), *own}), tiling if known else None)
