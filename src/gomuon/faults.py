"""Gradients that no update may be made of."""

import math
from collections.abc import Iterable, Sequence

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
    gradients_only = [gradient for _, gradient in named]
    if _all_finite(torch._foreach_norm(gradients_only)):
        return None
    # Large finite gradients overflow the 2-norm; the largest entry is exact but slower.
    largest = torch._foreach_norm(gradients_only, math.inf)
    if _all_finite(largest):
        return None
    bad = [name for (name, _), norm in zip(named, largest, strict=True) if not norm.isfinite()]
    more = f", and those of {len(bad) - 1} more parameters" if len(bad) > 1 else ""
    return f"the gradient of {bad[0]!r} holds NaN or infinity{more}"


def _all_finite(norms: Sequence[Tensor]) -> bool:
    return bool(torch.stack([norm.to(norms[0]) for norm in norms]).isfinite().all())
