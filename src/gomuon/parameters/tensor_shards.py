"""Tensor parallelism on DTensor: which part of each parameter and activation this rank has.

`parallelize_module` cuts a linear layer's weight along its outputs (column-parallel) or along its
inputs (row-parallel). `fully_shard` may cut the rows of these parts once more. Does not import
torch.distributed unless there are such parameters.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gomuon.parameters.sharding import is_fully_sharded, is_sharded

OUTPUTS, INPUTS = 0, 1  # the dimension of a weight along which it is cut


@dataclass(frozen=True)
class TensorShard:
    """A parameter's place in tensor parallelism.

    Attributes:
        mesh: the one-dimensional device mesh of the ranks that divide the layers.
        dim: the dimension along which the parameter is cut; None: each rank has all of it.
        along: the dimension of the parameter's own mesh that divides layers; None if its mesh is of
            other ranks, or if it is no DTensor.
    """

    mesh: Any
    dim: int | None = None
    along: int | None = None

    @property
    def parts(self) -> int:
        """The number of ranks that divide the layers."""
        size: int = self.mesh.size()
        return size

    @property
    def index(self) -> int:
        """This rank's number among them."""
        index: int = self.mesh.get_local_rank()
        return index

    def shape(self, parameter: Tensor) -> tuple[int, ...]:
        """The shape of this rank's block, which `fully_shard` may have cut further."""
        return tuple(
            size // self.parts if dim == self.dim else size
            for dim, size in enumerate(parameter.shape)
        )

    def describe(self, *, gathered: bool) -> str:
        """For the routing table. `gathered` says that the whole matrix is computed."""
        if self.dim is None:
            return ""
        kind = "column" if self.dim == OUTPUTS else "row"
        if gathered:
            return f"{kind}-parallel, gathered from {self.parts} ranks"
        return f"{kind}-parallel, block {self.index} of {self.parts}"


def tensor_shards(model: nn.Module) -> dict[Tensor, TensorShard]:
    """The places of a model's parameters; empty without tensor parallelism.

    Raises:
        ValueError: parameters are divided in a way that is not supported.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    meshes: list[Any] = [p.device_mesh for p in names if is_sharded(p)]  # type: ignore[attr-defined]
    if not meshes:
        return {}
    depth = max(mesh.ndim for mesh in meshes)
    if any(map(is_fully_sharded, model.modules())):
        # `fully_shard` puts the dimension that divides layers last. Replicas of shards have two
        # dimensions as well, but never columns or interleaved rows.
        if depth == 1 or not any(map(_is_of_layers, names)):
            return {}
    elif depth > 1:
        raise ValueError(
            f"parameters of {type(model).__name__} are divided over a mesh of {depth} dimensions, "
            "but not by fully_shard; use a mesh of one dimension in parallelize_module, and "
            "fully_shard over another one for data parallelism"
        )
    whole = next(mesh for mesh in meshes if mesh.ndim == depth)
    mesh = whole if depth == 1 else whole[whole.mesh_dim_names[-1]]
    return {p: _place(name, p, mesh, depth) for p, name in names.items()}


def _is_of_layers(parameter: Tensor) -> bool:
    """Whether the placements can only come from tensor parallelism under `fully_shard`."""
    if not is_sharded(parameter):
        return False
    from torch.distributed.tensor import Replicate, Shard

    placements: Any = parameter.placements  # type: ignore[attr-defined]
    known = all(type(p) in (Replicate, Shard) for p in placements)
    last = placements[-1]
    return len(placements) > 1 and (not known or (type(last) is Shard and last.dim != 0))


def _place(name: str, parameter: Tensor, mesh: Any, depth: int) -> TensorShard:
    if not is_sharded(parameter) or parameter.device_mesh.ndim < depth:  # type: ignore[attr-defined]
        return TensorShard(mesh)
    from torch.distributed.tensor import Replicate, Shard

    placements: Any = parameter.placements  # type: ignore[attr-defined]
    last, rest = placements[-1], [p for p in placements[:-1] if type(p) is not Replicate]
    dim = last.dim if type(last) is Shard else None
    known = type(last) is Replicate or (type(last) is Shard and dim in (OUTPUTS, INPUTS))
    if not known or len(rest) > 1 or any(getattr(p, "dim", None) != 0 for p in rest):
        raise ValueError(
            f"parameter {name!r} has the placements {tuple(placements)}; expected Shard(0), "
            "Shard(1) or Replicate() over the ranks that divide the layers, as made by "
            "ColwiseParallel and RowwiseParallel, and before it at most one cut of rows, as made "
            "by fully_shard"
        )
    place = TensorShard(mesh, dim, depth - 1)
    if dim is not None and parameter.shape[dim] % place.parts:
        raise ValueError(
            f"parameter {name!r} has the shape {tuple(parameter.shape)}, and {place.parts} ranks "
            f"do not divide its dimension {dim} equally; choose a size that they divide"
        )
    return place


# ---- activations ---------------------------------------------------------------------------------

Rewrap = Callable[[Tensor], Tensor]


def arrived(x: Tensor) -> Tensor:
    """The tensor itself, if it is the result of a message that may still be on its way."""
    if hasattr(x, "trigger_wait"):
        x.trigger_wait()
        return x.elem  # type: ignore[attr-defined]
    return x


def local_input(x: Tensor, dim: int | None) -> Tensor:
    """This rank's columns of a layer's input, if its weight is cut along `dim`."""
    if not is_sharded(x):
        return arrived(x)
    from torch.distributed.tensor import Replicate, Shard

    given: Any = x
    wanted = Shard(x.ndim - 1) if dim == INPUTS else Replicate()
    with torch.no_grad():
        if given.placements != (wanted,):  # the layer itself also had to send it
            given = given.redistribute(placements=[wanted])
        return arrived(given.to_local())


def local_output(y: Tensor, dim: int | None) -> tuple[Tensor, Rewrap] | None:
    """This rank's columns of a layer's output, and a function that makes them the output again.

    None if rows are divided: then no rank sees all of them. The output of a row-parallel layer is
    a part of a sum. Its gradient is that of the sum, and whole on every rank.
    """
    if not is_sharded(y):
        return y, lambda tapped: tapped
    from torch.distributed.tensor import DTensor, Replicate, Shard

    given: Any = y
    (placement,) = given.placements
    gradient = Replicate() if placement.is_partial() else placement
    if gradient != (Shard(y.ndim - 1) if dim == OUTPUTS else Replicate()):
        return None

    def rewrap(tapped: Tensor) -> Tensor:
        whole: Tensor = DTensor.from_local(
            tapped,
            given.device_mesh,
            given.placements,
            run_check=False,
            shape=given.shape,
            stride=given.stride(),
        )
        return whole

    return arrived(given.to_local(grad_placements=[gradient])), rewrap


def add_up_gradients(groups: Sequence[Mapping[str, Any]]) -> None:
    """Of all parameters, before ranks compare their gradients."""
    for group in groups:
        for parameter in group["params"]:
            add_up_gradient(parameter)


def add_up_gradient(parameter: Tensor) -> None:
    """Make a gradient that is a part of a sum, as in sequence parallelism, the sum."""
    gradient: Any = parameter.grad
    if gradient is None or not is_sharded(gradient):
        return
    placements = parameter.placements  # type: ignore[attr-defined]
    if gradient.placements != placements:
        parameter.grad = gradient.redistribute(placements=placements)
