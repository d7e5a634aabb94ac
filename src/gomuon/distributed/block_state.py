"""The state of blocks under tensor parallelism, as it is saved.

Each rank keeps the state of its own block as plain tensors. In a checkpoint the blocks of all ranks
stand beside each other in one DTensor, because ranks have them under the same name.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from gomuon.parameters.sharding import is_sharded
from gomuon.parameters.tensor_shards import TensorShard


def side_by_side(
    state: Mapping[int, dict[str, Any]],
    parameters: Sequence[Tensor],
    shards: Mapping[Tensor, TensorShard],
) -> dict[int, dict[str, Any]]:
    """A saved state in which tensors of blocks are parts of DTensors. Nothing is sent.

    Args:
        state: this rank's state, by the numbers of the parameters.
        parameters: the optimizer's parameters.
        shards: their places in tensor parallelism.
    """
    found = dict(state)
    for number, parameter in enumerate(parameters):
        place = shards.get(parameter)
        if place is not None and place.dim is not None and number in state:
            found[number] = {
                key: _beside(value, parameter, place) for key, value in state[number].items()
            }
    return found


def _beside(value: Any, parameter: Tensor, place: TensorShard) -> Any:
    if not isinstance(value, Tensor) or not value.ndim or is_sharded(value):
        return value  # a count, or a moment of AdamW, which is a DTensor already
    from torch.distributed.tensor import DTensor, Shard

    # Momentum in the parameter's shape; everything else begins with the number of matrices.
    dim = place.dim if tuple(value.shape) == place.shape(parameter) else 0
    assert dim is not None
    return DTensor.from_local(value.detach(), place.mesh, [Shard(dim)], run_check=False)
