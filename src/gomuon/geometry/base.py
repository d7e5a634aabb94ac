"""What every geometry offers, and the guarded roots they share."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gomuon.errors import DecompositionError
from gomuon.functional import inverse_root
from gomuon.layers import Layer

Group = Mapping[str, Any]


class Geometry:
    """One choice on the geometry axis; this one has no maps and does nothing."""

    description = "none"

    def captured_sides(self, group: Group) -> tuple[bool, bool]:
        """Whether (output gradients, inputs) are captured on the steps `capture_due` names."""
        return False, False

    def capture_due(self, group: Group) -> bool:
        """Whether the step numbered `group["step"]` reads captured statistics."""
        return False

    def before(self, layers: Sequence[Layer], group: Group) -> list[Layer]:
        """Renew what is due from statistics and gradients; returns layers that could not be."""
        return []

    def after(self, layers: Sequence[Layer], group: Group) -> None:
        """Renew, after the update, what the next step will use."""


def due(group: Group, clock: str = "refresh_every") -> bool:
    """t mod K = 0."""
    return bool(group["step"] % group[clock] == 0)


def guarded(function: Callable[[Tensor], Tensor], S: Tensor) -> list[Tensor | None]:
    """`function` of a batch of factors; None where one is not finite or does not decompose."""
    finite = torch.isfinite(S).flatten(1).all(1)
    identity = torch.eye(S.shape[-1], dtype=S.dtype, device=S.device)
    # LAPACK refuses a whole batch for one NaN, so unusable factors are stood in for.
    S = torch.where(finite.view(-1, *[1] * (S.ndim - 1)), S, identity)
    try:
        # Clones, not views, any one of which would keep the whole batch alive.
        results: list[Tensor | None] = [result.clone() for result in function(S)]
    except (DecompositionError, torch.linalg.LinAlgError):
        results = [_or_none(function, factor) for factor in S]
    return [result if good else None for result, good in zip(results, finite.tolist(), strict=True)]


def guarded_roots(S: Tensor, power: float) -> list[Tensor | None]:
    return guarded(lambda factors: inverse_root(factors, power), S)


def _or_none(function: Callable[[Tensor], Tensor], S: Tensor) -> Tensor | None:
    try:
        return function(S.unsqueeze(0))[0]
    except (DecompositionError, torch.linalg.LinAlgError):
        return None


def keep(layer: Layer, name: str, value: Tensor | None) -> list[Layer]:
    """Cache a new map, or report the layer and leave the old one (Corollary 2)."""
    if value is None:
        return [layer]
    layer.state[name] = value
    return []


def trace_mean(S: Tensor) -> Tensor:
    """tr(S)/d, [..., 1, 1]."""
    return S.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]


def identity_like(S: Tensor) -> Tensor:
    return torch.eye(S.shape[-1], dtype=S.dtype, device=S.device)
