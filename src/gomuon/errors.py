"""Errors and warnings of this package, so that callers can distinguish them from torch's."""

from typing import Any

from torch import Tensor


class DecompositionError(RuntimeError):
    """A matrix decomposition failed in the working precision and again in float64."""


class NonFiniteGradientError(RuntimeError):
    """A gradient has NaN or infinity. The step changed nothing."""


class GeometryWarning(UserWarning):
    """A layer uses a geometry that the user may not expect: the identity, or an old one."""


class RankError(RuntimeError):
    """Another rank failed, died, or has a different model or settings."""


def describe_exception(failure: BaseException) -> str:
    """An exception and its notes in one line."""
    return "; ".join([f"{type(failure).__name__}: {failure}", *getattr(failure, "__notes__", ())])


def describe_value(value: Any) -> str:
    """A short text for a value in a message. Tensors and arrays are described by their shape."""
    if isinstance(value, Tensor) and (value.numel() != 1 or value.is_meta):
        return f"a tensor of {value.dtype} with shape {tuple(value.shape)}"
    shape = getattr(value, "shape", None)
    if shape and type(shape) is tuple:
        return f"{type(value).__name__} with shape {shape}"
    if isinstance(value, int) and abs(value) >= 10**30:
        return f"a whole number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}… ({type(value).__name__})"
