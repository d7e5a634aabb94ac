"""The modules of a model whose weights can be captured by hooks."""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from gomuon.capture.hooks import CapturedModule
from gomuon.parameters.divided_rows import CapturedRows, divided
from gomuon.parameters.rows import ConvRows, is_transposed_linear, own_parameter, rows_for
from gomuon.parameters.sampling import Sampling
from gomuon.parameters.specs import DEFAULT_SPEC, LayerSpec, own_shape
from gomuon.parameters.tensor_shards import TensorShard


def captured_modules(
    model: nn.Module,
    sampling: Callable[[Tensor], Sampling],
    specs: Mapping[Tensor, LayerSpec] = MappingProxyType({}),
    gathered: Mapping[Tensor, TensorShard] = MappingProxyType({}),
) -> dict[Tensor, list[CapturedModule]]:
    """For each weight, its modules whose inputs and output gradients can be captured.

    `specs` say which block of a weight this rank has, if not all of it. `gathered` are the places
    of weights in tensor parallelism if the rows of all their blocks are gathered.
    """
    modules: dict[Tensor, list[CapturedModule]] = {}
    for module in model.modules():
        weight = own_parameter(module, "weight")
        if weight is None or not weight.numel():
            continue
        if isinstance(module, NonDynamicallyQuantizableLinear):
            continue  # the output projection of nn.MultiheadAttention, which does not call it
        rows = rows_for(module, sampling(weight))
        if rows is None:
            continue
        shape = own_shape(weight, specs.get(weight, DEFAULT_SPEC))
        m, n = shape[0], math.prod(shape[1:])
        m, n = (n, m) if is_transposed_linear(module) else (m, n)
        n += rows.sampling.ones
        groups = (rows.groups,) if isinstance(rows, ConvRows) and rows.groups > 1 else ()
        m //= groups[0] if groups else 1
        read: CapturedRows = divided(rows, gathered[weight]) if weight in gathered else rows
        modules.setdefault(weight, []).append(
            CapturedModule(module, read, (*groups, n, n), (*groups, m, m))
        )
    return modules
