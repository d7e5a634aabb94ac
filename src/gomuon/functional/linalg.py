"""Decompositions that try again in float64 before they give up."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from gomuon.errors import DecompositionError

Decomposition = TypeVar("Decomposition", bound=tuple[Tensor, ...])


def decompose(routine: Callable[[Tensor], Decomposition], X: Tensor) -> tuple[Tensor, ...]:
    """`routine(X)` in X's precision, retried once in float64.

    Args:
        routine: `torch.linalg.svd`-like, a tensor to a tuple of tensors.
        X: [..., m, n], float32 or float64.

    Returns:
        The factors in X's dtype.

    Raises:
        DecompositionError: X is not finite, or both attempts failed; the message says why.
    """
    what = f"a {tuple(X.shape)} {X.dtype} matrix"
    # LAPACK may answer these with anything, a finite result included.
    if not bool(torch.isfinite(X).all()):
        raise DecompositionError(f"cannot decompose {what}: it holds NaN or infinity")
    try:
        return tuple(routine(X))
    except torch.linalg.LinAlgError:
        try:
            return tuple(factor.to(X.dtype) for factor in routine(X.double()))
        except torch.linalg.LinAlgError as second:
            message = f"cannot decompose {what}, nor in float64: {second}"
            raise DecompositionError(message) from second
