"""Why nothing was captured of a layer although it was its turn, and what to do about it."""

import sys
from collections.abc import Iterable

from torch import Tensor

from gomuon.capture.hooks import LayerHook

# Refreshes in a row that may capture nothing of a layer with maps before a warning is due.
MISSED = 3

_FROZEN = (
    "its weight has requires_grad=False, and a gradient from before; set that to None, or train "
    "the weight"
)
_COMPILED = (
    "its module was not called since the last step. A model that was compiled and run before its "
    "optimizer was made ignores hooks: call torch.compiler.reset() once. If its weight is used "
    "without the module, nothing can be captured"
)
_NOT_CALLED = (
    "its module was not called since the last step: its weight is used without it, in other code "
    "than that of the module around it or by a function that is no product, or its gradient was "
    "set by hand. Call the module itself to have it captured"
)
_NO_GRADIENTS = (
    "all forward passes of its module since the last step were without gradients (no_grad, "
    "inference_mode or torch.func), or its inputs and outputs are not plain tensors with one row "
    "for each use of the weight. Run the training pass with gradients"
)
_NOT_BACKWARD = (
    "no backward pass delivered anything to its module: torch.autograd.grad, or gradients that are "
    "set by hand, bring no statistics. Call loss.backward()"
)


def cause_of(parameter: Tensor, hooks: Iterable[LayerHook]) -> str:
    """Why nothing was captured for a parameter with these hooks in this step."""
    hooks = list(hooks)
    if not parameter.requires_grad:
        return _FROZEN
    if not any(hook.called for hook in hooks):
        return _COMPILED if _has_compiled() else _NOT_CALLED
    return _NOT_BACKWARD if any(hook.tapped for hook in hooks) else _NO_GRADIENTS


def _has_compiled() -> bool:
    """Whether this process has compiled anything. Does not load the compiler."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["frames"])
