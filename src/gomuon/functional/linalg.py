"""Decompositions on all cores that try again in float64 before they give up."""

from collections.abc import Callable
from typing import Any, TypeVar

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
    _require_finite(X)
    try:
        return over_batch(routine, X)
    except torch.linalg.LinAlgError:
        try:
            return tuple(factor.to(X.dtype) for factor in over_batch(routine, X.double()))
        except torch.linalg.LinAlgError as second:
            message = f"cannot decompose {_told(X)}, nor in float64: {second}"
            raise DecompositionError(message) from second


def attempt(routine: Callable[..., Tensor], X: Tensor, *more: Tensor, **options: Any) -> Tensor:
    """`routine(X, …)` in this thread and precision, without a second attempt.

    Raises:
        DecompositionError: X is not finite, or the routine failed; the message says why.
    """
    _require_finite(X)
    try:
        return routine(X, *more, **options)
    except torch.linalg.LinAlgError as failure:
        raise DecompositionError(f"cannot decompose {_told(X)}: {failure}") from failure


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


def _require_finite(X: Tensor) -> None:
    """Raise for NaN and infinity, which LAPACK may answer with anything, a finite result included.

    Every decomposition goes through here.
    """
    if not bool(finite_matrices(X).all()):
        raise DecompositionError(f"cannot decompose {_told(X)}: it holds NaN or infinity")


def _told(X: Tensor) -> str:
    return f"a {tuple(X.shape)} {X.dtype} matrix"


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
