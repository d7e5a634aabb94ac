"""One matrix parameter as the step sees it: a stack of matrices, whatever its own shape."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gomuon.capture import Statistics
from gomuon.probes import working_dtype


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


@dataclass(eq=False)
class Layer:
    """A parameter, its state, and what was captured of it in this step."""

    name: str
    parameter: Tensor
    state: dict[str, Any]
    spec: LayerSpec = PLAIN
    lag: float = 0.0  # by which part of the interval its refreshes come later, see `stagger`
    statistics: Statistics | None = None
    dtype: torch.dtype = field(init=False)
    shape: tuple[int, int] = field(init=False)
    rows: int = field(init=False)
    columns: int = field(init=False)
    blocks: int = field(init=False)

    def __post_init__(self) -> None:
        # State and arithmetic are float32 or wider, whatever the parameter's dtype.
        self.dtype = working_dtype(self.parameter)
        self._whole_shape = _sides(self.parameter, self.spec)
        self.rows, self.columns, *shape = self.spec.tiling(*self._whole_shape)
        self.shape = (shape[0], shape[1])
        self.blocks = self.rows * self.columns
        follow(self.parameter, self.state)

    @property
    def updates(self) -> int:
        """Updates this layer has had; a layer that joins late starts its own count."""
        return self.state.get("updates", 0)

    @property
    def weights(self) -> Tensor:
        """W, [blocks, m, n]."""
        return self._matrices(self.parameter, self.spec.bias)

    @property
    def whole_weight(self) -> Tensor:
        """The parameter, all of it."""
        return self.parameter

    @property
    def gradients(self) -> Tensor:
        """G, [blocks, m, n]."""
        bias = self.spec.bias
        return self._matrices(_gradient(self.parameter), None if bias is None else _gradient(bias))

    def assign(self, matrices: Tensor) -> None:
        """Write the stack back into the parameter (and the bias that joined it)."""
        whole = self._whole(matrices)
        if self.spec.bias is not None:
            if self.spec.bias.grad is not None:  # a frozen bias stays
                self.spec.bias.copy_(whole[:, -1])
            whole = whole[:, :-1]
        whole = whole.mT if self.spec.transposed else whole
        self.parameter.copy_(whole.reshape(self.parameter.shape))

    def move(self, factor: float | Tensor, step: Tensor) -> None:
        """W ← factor·W − step."""
        self.assign(factor * self.weights - step)

    @property
    def is_direct(self) -> bool:
        """Whether the parameter is its own matrix: no copy stands between it and the update."""
        return self.is_reshape and self.parameter.dtype == self.dtype

    def recall(self, name: str) -> Tensor:
        """An elementwise memory by name, [blocks, m, n]; zero at first."""
        kept = self.state.get(name)
        if kept is None:
            return torch.zeros(
                self.blocks, *self.shape, dtype=self.dtype, device=self.parameter.device
            )
        return kept.reshape(self.blocks, *self.shape) if self.is_reshape else kept

    def keep(self, name: str, matrices: Tensor) -> Tensor:
        """Let a memory be this view of a stack, in the parameter's shape where that is one."""
        view = matrices.view(self.parameter.shape) if self.is_reshape else matrices
        self.state[name] = view
        return view

    def spread(self, name: str, side: str) -> Tensor | None:
        """A cached map for each block, [blocks, …]; None stands for the identity."""
        kept: Tensor | None = self.state.get(name)
        if kept is None or len(kept) == self.blocks:
            return kept
        if side == "left":
            return kept.repeat_interleave(self.columns, 0)
        return kept.repeat(self.rows, *[1] * (kept.ndim - 1))

    @property
    def is_reshape(self) -> bool:
        """Whether the stack is the parameter itself in another shape."""
        spec = self.spec
        plain = not spec.transposed and spec.bias is None and spec.block is None
        return plain and spec.columns == 1

    def _matrices(self, tensor: Tensor, bias: Tensor | None) -> Tensor:
        matrix = tensor.to(self.dtype)
        matrix = matrix.mT if self.spec.transposed else matrix.reshape(len(matrix), -1)
        if bias is not None:
            matrix = torch.cat([matrix, bias.to(self.dtype).unsqueeze(1)], dim=1)
        (m, n), (high, wide) = self._whole_shape, self.shape
        if self.spec.block is not None:
            matrix = F.pad(matrix, (0, self.columns * wide - n, 0, self.rows * high - m))
        tiles = matrix.reshape(self.rows, high, self.columns, wide)
        return tiles.movedim(2, 1).reshape(self.blocks, high, wide)

    def _whole(self, matrices: Tensor) -> Tensor:
        (m, n), (high, wide) = self._whole_shape, self.shape
        tiles = matrices.reshape(self.rows, self.columns, high, wide).movedim(1, 2)
        return tiles.reshape(self.rows * high, self.columns * wide)[:m, :n]


def check_spec(name: str, parameter: Tensor, spec: LayerSpec) -> None:
    """Raise a ValueError when the blocks do not divide the parameter."""
    if not parameter.ndim:
        raise ValueError(f"{name!r} is a single number, which cannot be cut; leave it out of specs")
    m, n = _sides(parameter, spec)
    for side, size, blocks in (("rows", m, spec.rows), ("columns", n, spec.columns)):
        if blocks < 1 or size % blocks:
            raise ValueError(f"{blocks} blocks do not divide the {size} {side} of {name!r}")


def staggered(parameters: Sequence[Tensor]) -> list[float]:
    """Lags in [0, 1) that spread refreshes evenly by cost over an interval.

    In the model's order, so that neighbours, who may share their inputs, mostly keep together.
    """
    costs = [float(sum(side**3 for side in _sides(p, PLAIN))) for p in parameters]
    middles = [sum(costs[:i]) + cost / 2 for i, cost in enumerate(costs)]
    return [middle / sum(costs) for middle in middles]


def follow(parameter: Tensor, state: dict[str, Any]) -> None:
    """Let a model that was moved or converted take its state along."""
    for key, value in state.items():
        if isinstance(value, Tensor) and key != "step":  # AdamW counts on the host
            state[key] = value.to(parameter.device, working_dtype(parameter))


def _sides(parameter: Tensor, spec: LayerSpec) -> tuple[int, int]:
    """Output and input side of the whole matrix."""
    first = parameter.shape[0]
    rest = parameter.numel() // first
    m, n = (rest, first) if spec.transposed else (first, rest)
    return m, n + (spec.bias is not None)


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
