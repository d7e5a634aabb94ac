"""Gradients that no update may be made of."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor


def nonfinite_gradients(gradients: Iterable[tuple[str, Tensor | None]]) -> str | None:
    """Say which gradients hold NaN or infinity; None when all are finite.

    Raises:
        ValueError: a gradient is sparse.
    """
    named = [(name, g) for name, g in gradients if g is not None and g.numel()]
    for name, gradient in named:
        if gradient.layout != torch.strided:
            raise ValueError(f"the gradient of {name!r} is sparse; expected a dense one")
    if not named:
        return None
    # The largest entry, not the 2-norm, which overflows for large finite gradients.
    largest = torch._foreach_norm([gradient for _, gradient in named], math.inf)
    if bool(torch.stack([norm.to(largest[0]) for norm in largest]).isfinite().all()):
        return None
    bad = [name for (name, _), norm in zip(named, largest, strict=True) if not norm.isfinite()]
    more = f", and those of {len(bad) - 1} more parameters" if len(bad) > 1 else ""
    return f"the gradient of {bad[0]!r} holds NaN or infinity{more}"
