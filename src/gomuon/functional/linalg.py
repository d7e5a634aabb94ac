"""Decompositions with a retry in float64, symmetric products, and checks for finite results."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from gomuon.errors import DecompositionError
from gomuon.threads.spreading import spread

Factors = TypeVar("Factors", bound=tuple[Tensor, ...])
Multiply = Callable[[Tensor, Tensor], Tensor]  # of two matrices, or two batches of them

# The side from which the strips of a symmetric result cost less than they save.
TRIANGLE_FROM = 256


def decompose(routine: Callable[[Tensor], Factors], X: Tensor) -> tuple[Tensor, ...]:
    """`routine(X)` in X's precision, retried once in float64.

    Args:
        routine: a function like `torch.linalg.svd`, from a tensor to a tuple of tensors.
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
            message = f"cannot decompose {_describe_matrix(X)}, also not in float64: {second}"
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
        raise DecompositionError(f"cannot decompose {_describe_matrix(X)}: {failure}") from failure


def decomposes_well(device: torch.device) -> bool:
    """Whether decompositions are quick there; on accelerators matrix products are quicker."""
    return device.type == "cpu"


def has_float64(X: Tensor) -> bool:
    return X.device.type != "mps"


def widened(X: Tensor) -> Tensor:
    """X in float64, if the device supports it."""
    return X.double() if has_float64(X) else X


def finite_matrices(X: Tensor) -> Tensor:
    """Which matrices of X [..., m, n] hold neither NaN nor infinity, [...]."""
    # A sum is faster than a check of every entry. It may overflow although all entries are finite.
    finite = X.sum(dim=(-2, -1)).isfinite()
    return finite if bool(finite.all()) else X.isfinite().all(-1).all(-1)


def _require_finite(X: Tensor) -> None:
    """Raise for NaN and infinity. LAPACK may give any result for them, even a finite one.

    Every decomposition calls this.
    """
    if not bool(finite_matrices(X).all()):
        raise DecompositionError(
            f"cannot decompose {_describe_matrix(X)}: it holds NaN or infinity"
        )


def _describe_matrix(X: Tensor) -> str:
    return f"a {tuple(X.shape)} {X.dtype} matrix"


def over_batch(
    function: Callable[..., tuple[Tensor, ...]],
    X: Tensor,
    *more: Tensor | None,
    multiplies: bool = False,
) -> tuple[Tensor, ...]:
    """`function(X, *more)` over any leading dimensions; our own threads share the matrices.

    A function that only `multiplies` is called once: torch's own threads share products well.
    """
    if X.ndim == 2:
        return tuple(function(X, *more))
    leading = X.shape[:-2]
    flat = (None if t is None else _flat_batch(t, leading) for t in more)
    if multiplies:
        results = tuple(function(X.flatten(0, -3), *flat))
    else:
        results = spread(lambda *parts: tuple(function(*parts)), X.flatten(0, -3), *flat)
    return tuple(result.unflatten(0, leading) for result in results)


def _flat_batch(t: Tensor, leading: torch.Size) -> Tensor:
    """A map for every matrix of a batch with these leading dimensions, [b, …]."""
    batched = t.ndim >= len(leading) + 2 and t.shape[: len(leading)] == leading
    t = t if batched else t.expand(*leading, *t.shape[-2:])
    return t.flatten(0, len(leading) - 1)  # what is left may be blocks, [k, s, s]


def symmetric_product(rows: Tensor, multiply: Multiply = torch.matmul) -> Tensor:
    """VᵀV of V [..., N, d]; blocks below the diagonal are copied from above it."""
    block = max(128, rows.shape[-1] // 16)  # wide enough for products to run at full speed
    return _by_triangle(rows.mT, rows, block, multiply)


def symmetric_result(A: Tensor, B: Tensor) -> Tensor:
    """AB [..., d, d] where AB is symmetric: A = Bᵀ, or A and B symmetric and commuting.

    Blocks below the diagonal are copied from above it, so the result is exactly symmetric.
    """
    d = A.shape[-2]
    if d < TRIANGLE_FROM:
        return A @ B
    # On accelerators a strip must be larger for its product to be worth a launch.
    return _by_triangle(A, B, max(64, d // 16) if A.device.type == "cpu" else max(1024, d // 8))


def _by_triangle(
    A: Tensor,
    B: Tensor,
    block: int,
    multiply: Multiply = torch.matmul,
) -> Tensor:
    """AB [..., d, d], strips of `block` rows from the diagonal on."""
    d = A.shape[-2]
    if d < 2 * block:
        return multiply(A, B)
    first = multiply(A[..., :block, :], B)
    product = first.new_empty(*A.shape[:-2], d, d)
    for begin in range(0, d, block):
        end = min(begin + block, d)
        strip = multiply(A[..., begin:end, :], B[..., begin:]) if begin else first
        product[..., begin:end, begin:] = strip
        product[..., end:, begin:end] = strip[..., end - begin :].mT
    return product


def working_dtype(tensor: Tensor) -> torch.dtype:
    """State and statistics are float64 for float64 parameters, float32 for all others."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def is_diagonal(S: Tensor) -> bool:
    """Whether S is only a diagonal, [..., d, 1] or [..., 1, d]; see `block_diagonal.py`."""
    return S.shape[-1] != S.shape[-2]


def identity_like(S: Tensor) -> Tensor:
    """The identity of S's size, [d, d]; ones if S is a diagonal."""
    if is_diagonal(S):
        return torch.ones(S.shape[-2:], dtype=S.dtype, device=S.device)
    return torch.eye(S.shape[-1], dtype=S.dtype, device=S.device)


def trace_mean(S: Tensor) -> Tensor:
    """tr(S)/d, [..., 1, 1]."""
    if is_diagonal(S):
        return S.mean(dim=(-2, -1), keepdim=True)
    return S.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]


# ---- finite and non-finite results ---------------------------------------------------------------


def finite_factors(S: Tensor) -> Tensor:
    """Which factors of a batch are usable, [b]. A factor whose sum overflows is not."""
    return S.flatten(1).sum(1).isfinite()


def all_finite(tensors: Sequence[Tensor], unusable: Sequence[Tensor] = ()) -> bool:
    """Whether every tensor's norm is finite and no mask is set. Waits for the device once."""
    norms = list(torch._foreach_norm(list(tensors))) if tensors else []
    if len({(norm.dtype, norm.device) for norm in norms}) == 1:
        norms = [torch.stack(norms)]
    signs = [norm.isfinite().all() for norm in norms] + [~mask.any() for mask in unusable]
    return not signs or bool(torch.stack([sign.to(signs[0].device) for sign in signs]).all())


def guarded(function: Callable[[Tensor], Tensor], S: Tensor) -> list[Tensor | None]:
    """`function` of each factor; None if it fails, or the factor or result is not finite."""
    finite = finite_factors(S)
    # LAPACK rejects a whole batch for one NaN, so unusable factors are replaced by the identity.
    S = torch.where(finite.view(-1, *[1] * (S.ndim - 1)), S, identity_like(S))
    try:
        results: list[Tensor | None] = list(function(S))
    except (DecompositionError, torch.linalg.LinAlgError):
        results = [_or_none(function, factor) for factor in S]
    good = finite.tolist()
    made = [result for result in results if result is not None]
    if made and not bool(finite_factors(torch.stack(made)).all()):
        # A factor at the limit of its dtype may be finite although its root is not.
        results = [r if r is not None and bool(finite_factors(r[None])) else None for r in results]
    return [result if fine else None for result, fine in zip(results, good, strict=True)]


def _or_none(function: Callable[[Tensor], Tensor], S: Tensor) -> Tensor | None:
    try:
        return function(S.unsqueeze(0))[0]
    except (DecompositionError, torch.linalg.LinAlgError):
        return None


@contextmanager
def full_precision(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Switch autocast off on these tensors' devices."""
    with ExitStack() as exact:
        for kind in {tensor.device.type for tensor in tensors}:
            if torch.is_autocast_enabled(kind):
                exact.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextmanager
def full_float32() -> Iterator[None]:
    """Compute float32 products in float32, whatever faster products the user allows.

    TF32 and bfloat16 lose small eigenvalues. The settings are those of the whole process: products
    of other threads are exact as well meanwhile.
    """
    with ExitStack() as put_back:
        backends: Any = torch.backends
        if hasattr(backends.cuda.matmul, "fp32_precision"):  # from torch 2.9 on
            for products in (backends.cuda.matmul, backends.mkldnn.matmul):
                _make_exact(products, put_back)
        elif (allowed := torch.get_float32_matmul_precision()) != "highest":
            put_back.callback(torch.set_float32_matmul_precision, allowed)
            torch.set_float32_matmul_precision("highest")
        yield


def _make_exact(products: Any, put_back: ExitStack) -> None:
    """Only the newer settings are read: the older ones raise an error if both were used."""
    allowed = products.fp32_precision
    if allowed not in ("none", "ieee"):
        put_back.callback(_allow_again, products, allowed)
        products.fp32_precision = "ieee"


def _allow_again(products: Any, allowed: str) -> None:
    products.fp32_precision = "none"  # as set for all backends
    if products.fp32_precision != allowed:
        products.fp32_precision = allowed
