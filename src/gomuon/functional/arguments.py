"""Checks of the arguments of public functions.

Of tensors only types, shapes, dtypes and devices are checked: reading values would wait for an
accelerator. Plain numbers are checked too. Every message names the argument, what was expected and
what was given.
"""

import math
import numbers
from typing import Any

import torch
from torch import Tensor

from gomuon.errors import describe_value

_WIDE = (torch.float32, torch.float64)
LEAST = 5e-324  # the smallest number above 0


def tensor(X: Any, name: str) -> None:
    """Raise a TypeError unless X is a dense tensor."""
    if not isinstance(X, Tensor):
        raise TypeError(f"{name} must be a tensor, got {describe_value(X)}")
    if X.layout is not torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got one with layout {X.layout}")


def floating(X: Any, name: str, shape: str, ndim: int) -> None:
    """Raise unless X is a tensor of floating-point numbers with at least `ndim` dimensions."""
    tensor(X, name)
    if not X.dtype.is_floating_point:
        raise ValueError(f"{name} needs a floating-point dtype, got {X.dtype}")
    if X.ndim < ndim:
        raise ValueError(f"{name} must be {shape}, got shape {tuple(X.shape)}")


def matrix(X: Any, name: str) -> None:
    """Raise unless X is a tensor of floating-point matrices [..., m, n]."""
    floating(X, name, "[..., m, n]", 2)


def square(X: Any, name: str) -> None:
    """Raise unless X is a tensor of floating-point matrices [..., d, d]."""
    floating(X, name, "square matrices [..., d, d]", 2)
    if X.shape[-1] != X.shape[-2]:
        raise ValueError(f"{name} must be square matrices [..., d, d], got shape {tuple(X.shape)}")


def decomposable(X: Tensor, name: str) -> None:
    """Raise a ValueError unless LAPACK supports the dtype of X, and X has values."""
    if X.dtype not in _WIDE:
        raise ValueError(f"{name} needs float32 or float64, got {X.dtype}")
    if X.is_meta:
        raise ValueError(f"{name} must hold values, got a tensor on the meta device")


def not_empty(X: Tensor, name: str) -> None:
    """Raise a ValueError if the matrices have no entries. A batch of zero matrices is allowed."""
    if not X.shape[-1] or not X.shape[-2]:
        raise ValueError(
            f"{name} must have at least one row and one column, got shape {tuple(X.shape)}"
        )


def sided(
    M: Any, left: Any, right: Any, names: tuple[str, str, str] = ("M", "left", "right")
) -> Tensor:
    """M [..., m, n], expanded to the leading dimensions of left [..., m, m], right [..., n, n].

    Raises unless shapes, dtypes and devices fit. A side may be None.
    """
    matrix(M, names[0])
    decomposable(M, names[0])
    result: Tensor = M
    for side, name, d in ((left, names[1], -2), (right, names[2], -1)):
        if side is None:
            continue
        square(side, name)
        if side.shape[-1] != M.shape[d]:
            raise ValueError(
                f"{name} must be {M.shape[d]}×{M.shape[d]} for {names[0]} with shape "
                f"{tuple(M.shape)}, got shape {tuple(side.shape)}"
            )
        same_dtype_and_device(side, name, M, names[0])
        if side.ndim > 2 and side.shape[:-2] != result.shape[:-2]:
            leading = broadcast_shape(side.shape[:-2], name, result.shape[:-2], names[0])
            result = result.expand(*leading, *M.shape[-2:])
    return result


def same_dtype_and_device(X: Tensor, name: str, other: Tensor, other_name: str) -> None:
    """Raise a ValueError unless both have the same dtype and device."""
    if X.dtype != other.dtype or X.device != other.device:
        raise ValueError(
            f"{name} must have {other_name}'s dtype and device, {other.dtype} on {other.device}, "
            f"got {X.dtype} on {X.device}"
        )


def same_device(X: Tensor, name: str, other: Tensor, other_name: str) -> None:
    """Raise a ValueError unless both are on the same device."""
    if X.device != other.device:
        raise ValueError(f"{name} must be on {other_name}'s device, {other.device}, got {X.device}")


def broadcast_shape(shape: torch.Size, name: str, other: torch.Size, other_name: str) -> torch.Size:
    """The shape both broadcast to, or a ValueError."""
    try:
        return torch.broadcast_shapes(shape, other)
    except RuntimeError:
        raise ValueError(
            f"{name}'s leading dimensions must broadcast with {other_name}'s, {tuple(other)}, "
            f"got {tuple(shape)}"
        ) from None


def number(
    value: Any,
    expected: str,
    low: float = -math.inf,
    high: float = math.inf,
    *,
    whole: bool = False,
) -> Any:
    """The value as a plain number, checked to be finite and in [low, high).

    A tensor with one element counts as a number; it is returned as a 0-d tensor. `expected` is the
    text of the error and begins with the argument's name.
    """
    if not _is_number(value) or (whole and not isinstance(value, int)):
        raise TypeError(f"{expected}, got {describe_value(value)}")
    try:
        plain = float(value)
    except OverflowError:
        plain = math.inf
    if not (low <= plain < high and math.isfinite(plain)):
        raise ValueError(f"{expected}, got {describe_value(value)}")
    if isinstance(value, Tensor):
        return value.reshape(())
    return value if whole else plain


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        real = not value.is_complex() and value.dtype is not torch.bool
        return real and value.numel() == 1 and not value.is_meta and not value.is_sparse
    return isinstance(value, (int, float, numbers.Real)) and not isinstance(value, bool)


def weights(value: Any, S: Tensor, expected: str, low: float = -math.inf) -> None:
    """Raise unless value is a number >= low, or real numbers that broadcast over S's matrices."""
    if not isinstance(value, Tensor):
        number(value, expected, low)
        return
    name = expected.split(maxsplit=1)[0]
    tensor(value, name)
    if value.is_complex() or value.dtype is torch.bool:
        raise ValueError(f"{expected}, got {describe_value(value)}")
    if value.device != S.device and (value.ndim or value.is_meta):
        raise ValueError(f"{name} must be on S's device, {S.device}, got {value.device}")
    if value.ndim and value.shape != S.shape[:-2]:
        broadcast_shape(value.shape, name, S.shape[:-2], "S")


def method(value: Any, name: str = "polar_method") -> None:
    """Raise a TypeError unless the polar method is a string; `polar` checks which names exist."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be the name of a polar method, got {describe_value(value)}")
