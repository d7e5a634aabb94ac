"""The layout of an optimizer's parameters: how they are routed and cut into matrices."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from gomuon.parameters.groups import is_matrix, named
from gomuon.parameters.keeping import Keeping, wait_for_copies
from gomuon.parameters.layers import Layer, move_state_with
from gomuon.parameters.recut import Recut
from gomuon.parameters.routing import RoutingTable
from gomuon.parameters.side_forms import SideForm, described
from gomuon.parameters.specs import DEFAULT_SPEC, LayerSpec, matrix_sides, with_settings
from gomuon.parameters.state import Cut
from gomuon.parameters.tensor_shards import TensorShard
from gomuon.parameters.tiling import NO_MATRIX

Group = Mapping[str, Any]
State = Mapping[Tensor, dict[str, Any]]
AnyLayer = TypeVar("AnyLayer", bound=Layer)


@dataclass(frozen=True)
class MatrixParameter:
    """A matrix parameter that is updated in a step."""

    name: str
    parameter: Tensor
    state: dict[str, Any]
    spec: LayerSpec
    phase: float = 0.0
    keeping: Keeping | None = None

    @property
    def layer(self) -> Layer:
        """The layer, for a rank that has the whole parameter."""
        return self.layer_as(Layer)

    def layer_as(self, kind: type[AnyLayer]) -> AnyLayer:
        """The layer, as one of these."""
        return kind(self.name, self.parameter, self.state, self.spec, self.phase, self.keeping)


@dataclass
class Layout:
    """How parameters are routed and cut.

    Attributes:
        patterns: the user's `specs`.
        table: the routing of the model's parameters.
        specs: how parameters are cut, if not as one matrix.
        phases: for staggered layers, the fraction of the interval by which they refresh later.
        units: for layers whose clock adapts, the name of the unit that has one interval.
        captured: whether the method captures moments: then `block_size` cuts its factors, otherwise
            its matrices.
        wide: entries of the state that are kept as computed whatever `state_dtype` says.
        shards: the places of parameters in tensor parallelism; empty without it.
        gathers: whether whole matrices are gathered under tensor parallelism; otherwise each rank's
            block is a matrix of its own.
        ignored: parameters that the wrapper around the model leaves to each rank.
    """

    patterns: Mapping[str, LayerSpec] = field(default_factory=dict)
    table: RoutingTable = field(default_factory=RoutingTable)
    specs: dict[Tensor, LayerSpec] = field(default_factory=dict)
    phases: dict[Tensor, float] = field(default_factory=dict)
    units: dict[Tensor, str] = field(default_factory=dict)
    captured: bool = False
    wide: frozenset[str] = frozenset()
    shards: dict[Tensor, TensorShard] = field(default_factory=dict)
    gathers: bool = False
    ignored: frozenset[Tensor] = frozenset()

    @property
    def own(self) -> frozenset[Tensor]:
        """Parameters that only this rank has, such as its experts."""
        return self.own_among(self.specs)

    def own_among(self, specs: Mapping[Tensor, LayerSpec]) -> frozenset[Tensor]:
        """The same, with other specs."""
        said = {p: spec.ranks for p, spec in specs.items() if spec.ranks is not None}
        ignored = (p for p in self.ignored if p not in said)
        return frozenset((*ignored, *(p for p, ranks in said.items() if ranks == "own")))

    @property
    def blocks(self) -> Mapping[Tensor, TensorShard]:
        """The places of parameters of which each rank's part is a matrix of its own."""
        return {} if self.gathers else self.shards_without(self.own)

    @property
    def gathered(self) -> Mapping[Tensor, TensorShard]:
        """The places of parameters that are gathered."""
        return self.shards_without(self.own) if self.gathers else {}

    def shards_without(self, own: frozenset[Tensor]) -> Mapping[Tensor, TensorShard]:
        """The places of parameters that this rank shares with others."""
        return {p: shard for p, shard in self.shards.items() if p not in own}

    def spec_of(self, parameter: Tensor, group: Group) -> LayerSpec:
        """How a parameter is cut in a group with these settings."""
        spec = self.specs.get(parameter, DEFAULT_SPEC)
        return with_settings(spec, parameter, group, captured=self.captured)

    def forms_of(self, parameter: Tensor, group: Group) -> tuple[SideForm, SideForm]:
        """The forms of a parameter's factors, left and right."""
        spec = self.spec_of(parameter, group)
        return spec.forms(*matrix_sides(parameter, spec))

    def describe(self, parameter: Tensor, group: Group, captured: tuple[bool, bool]) -> str:
        """A parameter's geometry in words, if (left, right) of its group are captured."""
        layer = Layer("", parameter, {}, self.spec_of(parameter, group))
        return described(layer.forms, captured, layer.blocks, group.get("max_side"))

    def divided(
        self, index: int, group: Group, state: State
    ) -> tuple[list[MatrixParameter], list[tuple[Tensor, dict[str, Any]]]]:
        """A group's parameters with gradients: matrices, and AdamW parameters with their states."""
        matrices: list[MatrixParameter] = []
        others: list[tuple[Tensor, dict[str, Any]]] = []
        joined = {spec.bias for weight, spec in self.specs.items() if weight.grad is not None}
        recut = Recut()
        if group.get("offload"):
            wait_for_copies(group["params"])
        for name, parameter in named(group, index):
            if parameter.grad is None or not parameter.numel() or parameter in joined:
                continue
            entries = state[parameter]
            if is_matrix(group, parameter):
                spec, phase = self.spec_of(parameter, group), self.phases.get(parameter, 0.0)
                if self.captured:
                    recut(entries, spec.forms(*matrix_sides(parameter, spec)))
                keeping = Keeping.of(group, parameter.device, self.wide)
                matrices.append(MatrixParameter(name, parameter, entries, spec, phase, keeping))
            else:
                move_state_with(parameter, entries)
                others.append((parameter, entries))
        return matrices, others

    def cut_of(self, parameter: Tensor, group: Group, *, known: bool) -> Cut:
        """How a parameter is cut, to check its state. `known` says that its model is attached."""
        if not parameter.ndim or not parameter.numel():
            return Cut(frozenset(), NO_MATRIX)
        layer = Layer("", parameter, {}, self.spec_of(parameter, group))
        own = {layer.own_shape} if layer.is_reshape else set()
        memories = frozenset({(layer.blocks, *layer.shape), *own})
        return Cut(memories, layer.tiling if known else None)
