"""Errors and warnings of our own, so that callers can tell them from torch's."""

from typing import Any

from torch import Tensor


class DecompositionError(RuntimeError):
    """A matrix decomposition failed in the working precision and again in float64."""


class NonFiniteGradientError(RuntimeError):
    """A gradient held NaN or infinity; nothing was changed by the step that found it."""


class GeometryWarning(UserWarning):
    """A layer runs on a geometry the user may not expect: the identity, or an older one."""


class RankError(RuntimeError):
    """Another rank failed, died, or was set up differently."""


def told(failure: BaseException) -> str:
    """An exception in one line, with its notes."""
    return "; ".join([f"{type(failure).__name__}: {failure}", *getattr(failure, "__notes__", ())])


def shown(value: Any) -> str:
    """A value as messages show it: tensors and arrays by their shape, nothing at length."""
    if isinstance(value, Tensor) and (value.numel() != 1 or value.is_meta):
        return f"a tensor of {value.dtype} with shape {tuple(value.shape)}"
    shape = getattr(value, "shape", None)
    if shape and type(shape) is tuple:
        return f"{type(value).__name__} with shape {shape}"
    if isinstance(value, int) and abs(value) >= 10**30:
        return f"a whole number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}… ({type(value).__name__})"
