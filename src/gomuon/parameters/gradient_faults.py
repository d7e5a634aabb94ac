"""Finds gradients that cannot be used, and why."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gomuon.functional.linalg import working_dtype
from gomuon.parameters.groups import named
from gomuon.parameters.sharding import local_gradient

Gradients = Sequence[tuple[str, Tensor]]


def dense_gradients(groups: Sequence[Mapping[str, Any]]) -> Gradients:
    """This rank's gradients, by name.

    Raises:
        ValueError: a gradient is sparse.
    """
    present = [
        (name, gradient)
        for index, group in enumerate(groups)
        for name, parameter in named(group, index)
        if (gradient := local_gradient(parameter)) is not None and gradient.numel()
    ]
    for name, gradient in present:
        if gradient.layout != torch.strided:
            raise ValueError(f"the gradient of {name!r} is sparse; expected a dense gradient")
    return present


def unusable_gradients(gradients: Gradients) -> str | None:
    """A message that names the gradients that cannot be used; None if all can.

    Such gradients hold NaN, infinity, or numbers so large that their squares overflow.
    """
    # In the step's precision: float16 overflows where float32 does not.
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
