"""Gradients that no update can be made of."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from gomuon.probes import working_dtype

Gradients = Sequence[tuple[str, Tensor]]


def dense_gradients(gradients: Iterable[tuple[str, Tensor | None]]) -> Gradients:
    """Those there are, by name.

    Raises:
        ValueError: a gradient is sparse.
    """
    present = [(name, g) for name, g in gradients if g is not None and g.numel()]
    for name, gradient in present:
        if gradient.layout != torch.strided:
            raise ValueError(f"the gradient of {name!r} is sparse; expected a dense one")
    return present


def all_finite(gradients: Gradients, unusable: Sequence[Tensor]) -> bool:
    """Whether every gradient's norm is finite and no mask is set; waits for the device once."""
    norms = torch._foreach_norm([gradient for _, gradient in gradients]) if gradients else []
    signs = [norm.isfinite() for norm in norms] + [~mask.any() for mask in unusable]
    return not signs or bool(torch.stack([sign.to(signs[0].device) for sign in signs]).all())


def unusable_gradients(gradients: Gradients) -> str | None:
    """Say which gradients no update can be made of; None when all are good.

    Those are NaN, infinity, and numbers so large that their squares overflow: no norm, no Gram
    matrix and no second moment could be made of them.
    """
    # Half precision overflows where the step, which computes in float32, does not.
    bad = [(name, g) for name, g in gradients if not _norm(g).isfinite()]
    if not bad:
        return None
    more = f", and those of {len(bad) - 1} more parameters" if len(bad) > 1 else ""
    name, gradient = bad[0]
    largest = float(torch.linalg.vector_norm(gradient, math.inf))
    if not math.isfinite(largest):
        return f"the gradient of {name!r} holds NaN or infinity{more}"
    dtype = str(working_dtype(gradient)).removeprefix("torch.")
    return (
        f"the gradient of {name!r} is so large ({largest:.3g}) that squares overflow {dtype}{more}"
    )


def _norm(gradient: Tensor) -> Tensor:
    return torch.linalg.vector_norm(gradient, dtype=working_dtype(gradient))
