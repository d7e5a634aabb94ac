"""Layers whose weights their parents multiply with, without calling the layer.

Such as `F.linear(x, self.qkv.weight, bias)`. No hook on the layer sees that product, so functions
must be watched. Which weights these are is read from the code of the modules: watching all weights
would make every refresh step slower. If a parent calls the layer after all, its hook counts, and
the product inside of the layer is left out (`capture/functions.py`).
"""

import dis
import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from gomuon.parameters.rows import LinearRows, rows_for
from gomuon.parameters.sampling import ALL_ROWS

_READS = ("LOAD_ATTR", "LOAD_METHOD")
# Of a weight that is only asked for these, nothing is multiplied with.
_DESCRIBES = {"dtype", "device", "shape", "size", "ndim", "is_meta", "requires_grad"}


def borrowed_layers(model: nn.Module) -> set[nn.Module]:
    """Linear layers whose weights the forward pass of their parents may multiply with."""
    found: set[nn.Module] = set()
    read: dict[type[nn.Module], set[str]] = {}
    for parent in model.modules():
        kind = type(parent)
        if kind not in read:
            read[kind] = _weights_read(kind)
        for name in read[kind]:
            child = parent._modules.get(name)
            if child is not None and isinstance(rows_for(child, ALL_ROWS), LinearRows):
                found.add(child)
    return found


def _weights_read(kind: type[nn.Module]) -> set[str]:
    """The attributes whose weights the forward pass of a class reads."""
    found: set[str] = set()
    seen: set[CodeType] = set()
    waiting = list(_codes(kind, "forward"))
    while waiting:
        code = waiting.pop()
        if code in seen:
            continue
        seen.add(code)
        found.update(_owners_of_weights(code))
        waiting += [const for const in code.co_consts if isinstance(const, CodeType)]
        for name in code.co_names:  # methods that it calls
            waiting += _codes(kind, name)
    return found


def _codes(kind: type[nn.Module], name: str) -> Iterator[CodeType]:
    """The code of a method, without decorators; none if there is no such method, or it is torch's.

    What torch's own modules do is known. `fully_shard` makes classes of torch with others' methods.
    """
    function: Any = inspect.getattr_static(kind, name, None)
    function = inspect.unwrap(getattr(function, "__func__", function))
    if isinstance(function, FunctionType):
        defined_in: str | None = function.__module__
        if not (defined_in or "").startswith("torch."):
            yield function.__code__


def _owners_of_weights(code: CodeType) -> Iterator[str]:
    """The names x in `….x.weight`."""
    steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
    for owner, weight, then in zip(steps, steps[1:], [*steps[2:], None], strict=False):
        is_weight = weight.opname in _READS and weight.argval == "weight"
        if not (is_weight and owner.opname in _READS):
            continue
        if then is None or then.opname not in _READS or then.argval not in _DESCRIBES:
            yield owner.argval
