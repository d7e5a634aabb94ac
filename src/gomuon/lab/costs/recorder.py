"""Records every operation of a real step: its dtype, its FLOPs, and whether the host waits.

`gomuon bench` uses it to show what a step spends its FLOPs on. The tests hold stated costs to real
steps with it, and find what an accelerator should not be asked for.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gomuon
from gomuon.lab.costs.operators import DECOMPOSING, PRODUCTS, Decomposed, decomposed, waits

PACKAGE = Path(gomuon.__file__).parent


@dataclass(frozen=True)
class RecordedOperation:
    """One call of one of torch's operators.

    Attributes:
        name: the operator's, such as "bmm".
        shapes: of the tensors it was given.
        dtypes: of the tensors it was given, then of those it returned.
        flops: of a product or decomposition; 0 for other operators, whose work is elementwise.
        decomposition: what it decomposes, if it is LAPACK's or of that kind.
        waits: whether the host waits for the device, see `operators.waits`.
        on_host: whether all its tensors are on the CPU.
        place: for what decomposes, waits or is in float64, the line of the optimizer that called
            it, such as "step.py:88 find_fault"; "" if none did.
    """

    name: str
    shapes: tuple[torch.Size, ...]
    dtypes: tuple[torch.dtype, ...]
    flops: int
    decomposition: Decomposed | None
    waits: bool
    on_host: bool
    place: str = ""

    @property
    def is_float64(self) -> bool:
        return torch.float64 in self.dtypes or torch.complex128 in self.dtypes

    @property
    def dtype(self) -> torch.dtype | None:
        """What it computes in: the dtype of its first tensor of floating-point numbers."""
        return next((dtype for dtype in self.dtypes if dtype.is_floating_point), None)


class OperationRecorder(AbstractContextManager["OperationRecorder"]):
    """Records what runs inside: `with OperationRecorder() as record: optimizer.step()`.

    Backward passes are recorded, too. Meanwhile everything runs in this thread.
    """

    def __init__(self) -> None:
        self.operations: list[RecordedOperation] = []
        self.routine = ""  # of the decomposition that is being called, if its operator hides it
        self.silent = False  # while something runs that has been recorded as a whole
        self._modes = ExitStack()

    def __enter__(self) -> Self:
        # Devices other than the CPU have their own thread in backward passes.
        self._modes.enter_context(torch.autograd.set_multithreading_enabled(False))
        self._modes.enter_context(_Operators(self))
        self._modes.enter_context(_Functions(self))
        return self

    def __exit__(self, *failure: object) -> None:
        self._modes.close()

    @property
    def product_flops(self) -> int:
        return sum(x.flops for x in self.operations if x.decomposition is None)

    @property
    def decompositions(self) -> list[Decomposed]:
        return [x.decomposition for x in self.operations if x.decomposition is not None]


# These give a whole tensor to Python. If it is on the CPU, they call no operator.
_READING_ALL = {Tensor.tolist: "tolist", Tensor.numpy: "numpy", Tensor.__array__: "numpy"}
# Under a dispatch mode these compute vectors as well, and so look like another routine.
_VALUES_ONLY = {torch.linalg.svdvals: "svdvals", torch.linalg.eigvalsh: "eigvalsh"}


class _Functions(TorchFunctionMode):
    """Sees the functions that are called, before they are taken apart."""

    def __init__(self, record: OperationRecorder) -> None:
        super().__init__()
        self.record = record

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, record = kwargs or {}, self.record
        if func in _READING_ALL and not record.silent:
            record.operations.append(_read(_READING_ALL[func], args[0]))
            record.silent = True
            try:
                return func(*args, **kwargs)
            finally:
                record.silent = False
        nuclear = func is torch.linalg.matrix_norm and "nuc" in (kwargs.get("ord"), *args[1:2])
        record.routine = "svdvals" if nuclear else _VALUES_ONLY.get(func, "")
        return func(*args, **kwargs)


class _Operators(TorchDispatchMode):
    """Sees the operators that functions and backward passes are made of."""

    def __init__(self, record: OperationRecorder) -> None:
        super().__init__()
        self.record = record

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, record = kwargs or {}, self.record
        if any(map(_is_divided, types)):
            return NotImplemented  # its operators on this rank's part come here by themselves
        if record.silent or func.namespace == "prim":  # prim asks a tensor for its device
            return func(*args, **kwargs)
        packet = func._overloadpacket
        if packet not in PRODUCTS and packet.__name__ not in DECOMPOSING:
            # In inference mode functions arrive before they are taken apart.
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        record.operations.append(_recorded(packet, args, kwargs, result, record.routine))
        return result


def _recorded(
    packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, routine: str
) -> RecordedOperation:
    name: str = packet.__name__
    given, made = _tensors((args, kwargs)), _tensors(result)
    decomposition = decomposed(name, args, routine)
    flops = 0 if decomposition is None else decomposition.flops
    if packet in PRODUCTS:
        flops = int(PRODUCTS[packet](*args, **kwargs, out_val=result))
    devices = {tensor.device.type for tensor in (*given, *made)}
    operation = RecordedOperation(
        name,
        tuple(tensor.shape for tensor in given),
        tuple(tensor.dtype for tensor in (*given, *made)),
        flops,
        decomposition,
        waits(name, args, kwargs, devices),
        devices <= {"cpu"},
    )
    of_interest = operation.waits or decomposition is not None or operation.is_float64
    return _placed(operation) if of_interest else operation


def _is_divided(kind: type) -> bool:
    """Whether tensors of a class are divided among ranks. Does not import torch.distributed."""
    placements = sys.modules.get("torch.distributed.tensor")
    return placements is not None and issubclass(kind, placements.DTensor)


def _read(name: str, tensor: Tensor) -> RecordedOperation:
    """A tensor that is read as a whole."""
    on_host = tensor.device.type == "cpu"
    shapes, dtypes = (tensor.shape,), (tensor.dtype,)
    return _placed(RecordedOperation(name, shapes, dtypes, 0, None, True, on_host))


def _tensors(things: Any) -> list[Tensor]:
    return [thing for thing in tree_leaves(things) if isinstance(thing, Tensor)]


def _placed(operation: RecordedOperation) -> RecordedOperation:
    """The operation with the innermost line of the optimizer that led to it."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if file := _own_file(frame.f_code.co_filename):
            place = f"{file}:{frame.f_lineno} {frame.f_code.co_name}"
            return replace(operation, place=place)
        frame = frame.f_back
    return operation


@cache
def _own_file(name: str) -> str:
    """A file of the optimizer, as seen from the package; "" for all others."""
    path = Path(name)
    if not path.is_relative_to(PACKAGE) or path.is_relative_to(PACKAGE / "lab"):
        return ""
    return path.relative_to(PACKAGE).as_posix()
