"""What a real step does, as its costs are stated: FLOPs of products, and decompositions."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from gomuon.lab.costs.recorder import OperationRecorder
from gomuon.parameters.sharding import local
from gomuon.parameters.stacks import Stack
from gomuon.recipes.work import Decomposition, Operation, Product

Calls = Counter[tuple[str, int, int]]


def counted(action: Callable[[], Any]) -> tuple[int, Calls]:
    """FLOPs of the products of `action`, and its decompositions."""
    calls: Calls = Counter()
    with OperationRecorder() as record:
        action()
    for made in record.decompositions:
        calls[made.routine, made.m, made.n] += made.count
    return record.product_flops, calls


def predicted(work: list[Operation]) -> tuple[int, Calls]:
    """The same, from a list of operations."""
    calls: Calls = Counter()
    for operation in work:
        if isinstance(operation, Decomposition):
            calls[operation.routine, operation.m, operation.n] += operation.count
    return sum(x.flops for x in work if isinstance(x, Product)), calls


def kept_bytes(optimizer: torch.optim.Optimizer, stacks: Iterable[Stack] = ()) -> int:
    """Bytes of the state's tensors and of what the step keeps stacked; shared ones count once."""
    stacked = {
        whole.untyped_storage().data_ptr(): whole.nbytes
        for stack in stacks
        for _, whole in stack._kept.values()
    }
    tensors = [
        local(value)
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    ]
    regions = {
        (value.untyped_storage().data_ptr(), value.storage_offset()): value.nbytes
        for value in tensors
        if value.untyped_storage().data_ptr() not in stacked
    }
    return sum(stacked.values()) + sum(regions.values())
