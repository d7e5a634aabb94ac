"""A matrix parameter in the step: its weights and gradients as matrices, its state, its maps."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gomuon.functional.linalg import is_diagonal, working_dtype
from gomuon.intervals import Turn
from gomuon.moments import Statistics
from gomuon.parameters.keeping import Keeping, fit_state
from gomuon.parameters.sharding import local
from gomuon.parameters.side_forms import SideForm
from gomuon.parameters.specs import (
    DEFAULT_SPEC,
    LayerSpec,
    matrix_sides,
    own_shape,
    stored_sides,
)
from gomuon.parameters.state import INTERVAL
from gomuon.parameters.tiling import Tiling


@dataclass(eq=False)
class Layer:
    """A matrix parameter, its state, and its captured statistics of this step.

    The layer refreshes later by the fraction `phase` of the refresh interval, see `stagger`.
    """

    name: str
    parameter: Tensor
    state: dict[str, Any]
    spec: LayerSpec = DEFAULT_SPEC
    phase: float = 0.0
    keeping: Keeping | None = None  # None: state is kept as it is computed
    statistics: Statistics | None = None
    missed: int = 0  # refreshes in a row that captured nothing
    # Whether the cached maps were still good enough in this refresh; None: it was not measured.
    holds: bool | None = None
    # By side: which strips of a stack had no rows in this step, so that their maps stay.
    unseen: dict[str, Tensor] = field(default_factory=dict)
    dtype: torch.dtype = field(init=False)
    own_shape: tuple[int, ...] = field(init=False)  # of the parameter, or of this rank's block
    tiling: Tiling = field(init=False)
    shape: tuple[int, int] = field(init=False)
    blocks: int = field(init=False)
    forms: tuple[SideForm, SideForm] = field(init=False)  # of captured factors, left and right

    def __post_init__(self) -> None:
        # Arithmetic is float32 or wider, whatever the parameter's dtype; so is state by default.
        self.dtype = working_dtype(self.parameter)
        self.own_shape = own_shape(self.parameter, self.spec)
        self._whole_shape = matrix_sides(self.parameter, self.spec)
        self._stored = stored_sides(self.own_shape, self.spec)
        self.tiling = self.spec.tiling(*self._whole_shape, self._stored[0])
        self.shape, self.blocks = self.tiling.sides, self.tiling.blocks
        self.forms = self.spec.forms(*self._whole_shape)
        if self.state:
            fit_state(self.state, self.keeping, self.blocks, self.parameter.device, self.dtype)

    @property
    def updates(self) -> int:
        """The number of updates of this layer. A layer that is added later starts at zero."""
        return self.state.get("updates", 0)

    @property
    def turn(self) -> Turn:
        """When it refreshes."""
        return Turn(self.phase, self.state.get(INTERVAL))

    @property
    def weights(self) -> Tensor:
        """W, [blocks, m, n]."""
        bias = self.spec.bias
        return self._matrices(self.tensor, None if bias is None else self._here(bias))

    @property
    def has_weights(self) -> bool:
        """Whether this rank has the whole weights."""
        return True

    @property
    def whole_weight(self) -> Tensor:
        """The whole parameter, or the whole block."""
        return self.tensor

    @property
    def tensor(self) -> Tensor:
        """The parameter, or this rank's block of it."""
        return self._here(self.parameter)

    def _here(self, tensor: Tensor) -> Tensor:
        return tensor if self.spec.shard is None else local(tensor)

    @property
    def copies(self) -> int:
        """The number of ranks that compute this same layer, and are not replicas of the model."""
        return 1 if self.spec.shard is None else self.spec.shard.copies

    @property
    def gradients(self) -> Tensor:
        """G, [blocks, m, n]."""
        bias = self.spec.bias
        gradient = self._here(_gradient(self.parameter))
        return self._matrices(gradient, None if bias is None else self._here(_gradient(bias)))

    def assign(self, matrices: Tensor) -> None:
        """Write matrices [blocks, m, n] into the parameter (and the bias that joins it)."""
        weight, *bias = self.joined_again(matrices)
        if self.spec.bias is not None and self.spec.bias.grad is not None:
            self._here(self.spec.bias).copy_(bias[0])  # a frozen bias does not move
        self.tensor.copy_(weight)

    def joined_again(self, matrices: Tensor) -> list[Tensor]:
        """Matrices [blocks, m, n] as the parameter, and as the bias that joins it."""
        whole = self._whole(matrices)
        bias = [whole[0, :, -1]] if self.spec.bias is not None else []
        whole = whole[..., :-1] if bias else whole
        whole = whole.mT if self.spec.transposed else whole
        return [whole.reshape(self.own_shape), *bias]

    def move(self, factor: float | Tensor, step: Tensor) -> None:
        """W ← factor·W − step."""
        self.assign(factor * self.weights - step)

    @property
    def is_direct(self) -> bool:
        """Whether the parameter itself can be updated, without a copy in another form."""
        return self.is_reshape and self.parameter.dtype == self.dtype

    def memory_or_zeros(self, name: str) -> Tensor:
        """An elementwise memory as it is kept, [blocks, m, n]; zeros if there is none yet."""
        kept = self.state.get(name)
        if kept is None:
            dtype = self.dtype if self.keeping is None else self.keeping.dtype_of(name, self.dtype)
            return torch.zeros(self.blocks, *self.shape, dtype=dtype, device=self.parameter.device)
        return kept.reshape(self.blocks, *self.shape) if self.is_reshape else kept

    def set_memory(self, name: str, matrices: Tensor) -> Tensor:
        """Make this view of a stack the memory; in the parameter's shape if that is possible."""
        view = matrices.view(self.own_shape) if self.is_reshape else matrices
        self.state[name] = view
        return view

    def set_map(self, name: str, value: Tensor | None) -> bool:
        """Store a new map. None keeps the old map; the step is exact for it (Corollary 2)."""
        if value is not None:
            self.state[name] = self.stored(name, value)
        return value is not None

    def kept_where_unseen(self, name: str, value: Tensor) -> Tensor:
        """A new map, with the old one where a matrix of a stack had no rows."""
        unseen = self.unseen.get(side_of(name))
        if unseen is None:
            return value
        old = self.computed(name)
        old = identity_or_ones(value, "map") if old is None else old.to(value.device)
        return torch.where(unseen.view(-1, *[1] * (value.ndim - 1)), old, value)

    def stored(self, name: str, value: Tensor) -> Tensor:
        """A factor or map as it is kept between steps; see `Keeping`."""
        return value if self.keeping is None else self.keeping.stored(name, value, self.updates)

    def computed(self, name: str) -> Tensor | None:
        """A factor or map as steps compute with it."""
        kept: Tensor | None = self.state.get(name)
        if kept is None or self.keeping is None:
            return kept
        return self.keeping.computed(kept, self.parameter.device, self.dtype)

    def count(self, name: str) -> None:
        """Count one more in the state."""
        self.state[name] = self.state.get(name, 0) + 1

    def map_per_block(self, name: str, side: str) -> Tensor | None:
        """The map of each block, [blocks, …]; None stands for the identity."""
        return self.per_block(self.computed(name), side)

    def stored_per_block(self, name: str, side: str) -> Tensor | None:
        """The same as it is kept."""
        return self.per_block(self.state.get(name), side)

    def per_block(self, kept: Tensor | None, side: str) -> Tensor | None:
        """A map of this layer for each of its blocks."""
        if kept is None or len(kept) == self.blocks:
            return kept
        tiling = self.tiling
        if side == "left":
            return kept.repeat_interleave(tiling.columns, 0)
        strips = kept.unflatten(0, (tiling.stack, 1, tiling.columns))
        return strips.expand(-1, tiling.rows, *strips.shape[2:]).flatten(0, 2)

    @property
    def is_reshape(self) -> bool:
        """Whether [blocks, m, n] is just the parameter in another shape."""
        spec = self.spec
        plain = not spec.transposed and spec.bias is None and spec.block is None
        return plain and spec.column_blocks == 1

    def _matrices(self, tensor: Tensor, bias: Tensor | None) -> Tensor:
        matrices = tensor.to(self.dtype).reshape(self._stored)
        matrices = matrices.mT if self.spec.transposed else matrices
        if bias is not None:
            matrices = torch.cat([matrices, bias.to(self.dtype)[None, :, None]], dim=-1)
        (m, n), cut = self._whole_shape, self.tiling
        if self.spec.block is not None:
            matrices = F.pad(matrices, (0, cut.columns * cut.wide - n, 0, cut.rows * cut.high - m))
        tiles = matrices.reshape(cut.stack, cut.rows, cut.high, cut.columns, cut.wide)
        return tiles.movedim(3, 2).reshape(self.blocks, *self.shape)

    def _whole(self, matrices: Tensor) -> Tensor:
        """The matrices of the stack, [stack, m, n]."""
        (m, n), cut = self._whole_shape, self.tiling
        tiles = matrices.reshape(cut.stack, cut.rows, cut.columns, cut.high, cut.wide)
        tiles = tiles.movedim(2, 3)
        return tiles.reshape(cut.stack, cut.rows * cut.high, cut.columns * cut.wide)[:, :m, :n]


@contextmanager
def note_layers_on_error(layers: Sequence[Layer]) -> Iterator[None]:
    """Add a note to an exception that names the layers, unless it already has a note."""
    try:
        yield
    except Exception as failure:
        if getattr(failure, "__notes__", ()) or not layers:
            raise
        names = ", ".join(repr(layer.name) for layer in layers[:3])
        more = f" and {len(layers) - 3} more" if len(layers) > 3 else ""
        shapes = {f"{m}×{n}" for m, n in (layer.shape for layer in layers)}
        size = f" ({shapes.pop()})" if len(shapes) == 1 else ""
        failure.add_note(f"in the step of {names}{more}{size}")
        raise


def move_state_with(parameter: Tensor, state: dict[str, Any]) -> None:
    """Move the state to the parameter's device and dtype, if the model was moved or converted."""
    for key, value in state.items():
        if isinstance(value, Tensor) and key != "step":  # AdamW counts on the CPU
            state[key] = value.to(parameter.device, working_dtype(parameter))


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def side_of(name: str) -> str:
    """The side in the name of a map."""
    return name.partition("_")[0]


def identity_or_ones(like: Tensor, kind: str) -> Tensor:
    """For a layer without geometry: the identity, or ones if the map multiplies elementwise."""
    if kind in ("map", "basis") and not is_diagonal(like):
        return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)
    return torch.ones_like(like[:1])
