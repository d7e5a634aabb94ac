"""Counting what a real step does: products by torch's own counter, decompositions by call."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from gomuon.parameters.stacks import Stack
from gomuon.recipes.work import Decomposition, Operation, Product

Calls = Counter[tuple[str, int, int]]

_ROUTINES = {
    getattr(torch.linalg, name): name
    for name in ("svd", "svdvals", "eigh", "eigvalsh", "qr", "inv", "cholesky", "cholesky_ex",
                 "solve", "solve_ex")
}  # fmt: skip


class Decompositions(TorchFunctionMode):
    """Counts decompositions by routine and shape.

    Not a dispatch mode: under one, eigvalsh asks for eigenvectors and looks like eigh.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Calls = Counter()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = _ROUTINES.get(func, "").removesuffix("_ex")
        if func is torch.linalg.matrix_norm and kwargs.get("ord") == "nuc":
            name = "svdvals"
        if name:
            # Of equations, the right-hand sides: the other shape follows from theirs.
            X: Tensor = args[1 if name == "solve" else 0]
            self.calls[name, X.shape[-2], X.shape[-1]] += X[..., 0, 0].numel()
        return func(*args, **kwargs)


def counted(action: Callable[[], Any]) -> tuple[int, Calls]:
    """FLOPs of the products of `action`, and its decompositions."""
    counter = FlopCounterMode(display=False)
    decompositions = Decompositions()
    with counter, decompositions:
        action()
    return counter.get_total_flops(), decompositions.calls


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
    regions = {
        (value.untyped_storage().data_ptr(), value.storage_offset()): value.nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor) and value.untyped_storage().data_ptr() not in stacked
    }
    return sum(stacked.values()) + sum(regions.values())
