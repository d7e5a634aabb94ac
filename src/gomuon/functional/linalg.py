"""Decompositions on all cores that try again in float64 before they give up."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from gomuon.errors import DecompositionError
from gomuon.functional.spreading import spread

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
    if not bool(finite_matrices(X).all()):
        raise DecompositionError(f"cannot decompose {what}: it holds NaN or infinity")
    try:
        return over_batch(routine, X)
    except torch.linalg.LinAlgError:
        try:
            return tuple(factor.to(X.dtype) for factor in over_batch(routine, X.double()))
        except torch.linalg.LinAlgError as second:
            message = f"cannot decompose {what}, nor in float64: {second}"
            raise DecompositionError(message) from second


def has_float64(X: Tensor) -> bool:
    return X.device.type != "mps"


def widened(X: Tensor) -> Tensor:
    """X in float64, where the device has it."""
    return X.double() if has_float64(X) else X


def finite_matrices(X: Tensor) -> Tensor:
    """Which matrices of X [..., m, n] hold neither NaN nor infinity, [...]."""
    # A sum is quicker than looking at every entry; it may overflow where none of them does.
    finite = X.sum(dim=(-2, -1)).isfinite()
    return finite if bool(finite.all()) else X.isfinite().all(-1).all(-1)


def over_batch(
    function: Callable[..., tuple[Tensor, ...]], X: Tensor, *more: Tensor | None
) -> tuple[Tensor, ...]:
    """`function(X, *more)` over any leading dimensions, the matrices shared out among threads."""
    if X.ndim == 2:
        return tuple(function(X, *more))
    leading = X.shape[:-2]
    flat = (None if t is None else t.expand(*leading, *t.shape[-2:]).flatten(0, -3) for t in more)
    results = spread(lambda *parts: tuple(function(*parts)), X.flatten(0, -3), *flat)
    return tuple(result.unflatten(0, leading) for result in results)
