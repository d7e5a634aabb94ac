"""What every geometry offers, and the guarded roots they share."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gomuon.errors import DecompositionError
from gomuon.functional import inverse_root
from gomuon.layers import Layer
from gomuon.stacks import Stack

Group = Mapping[str, Any]


class Geometry:
    """One choice on the geometry axis; this one has no maps and does nothing."""

    description = "none"
    reads_weights = False

    def captured_sides(self, group: Group) -> tuple[bool, bool]:
        """Whether (output gradients, inputs) are captured on the steps `capture_due` names."""
        return False, False

    def capture_due(self, group: Group, lag: float = 0.0) -> bool:
        """Whether the step numbered `group["step"]` reads statistics of a layer with this lag."""
        return False

    def before(self, stacks: Sequence[Stack], group: Group) -> list[Layer]:
        """Renew what is due from statistics and gradients; returns layers that could not be."""
        return []

    def after(self, stacks: Sequence[Stack], group: Group) -> None:
        """Renew, after the update, what the next step will use."""


def due(group: Group, clock: str = "refresh_every", lag: float = 0.0) -> bool:
    """t mod K = 0, or ⌊lag·K⌋ for a layer that lags behind."""
    every: int = group[clock]
    return bool(group["step"] % every == int(lag * every))


def guarded(function: Callable[[Tensor], Tensor], S: Tensor) -> list[Tensor | None]:
    """`function` of a batch of factors; None where it or its factor is not finite, or it fails."""
    finite = is_finite(S)
    identity = torch.eye(S.shape[-1], dtype=S.dtype, device=S.device)
    # LAPACK refuses a whole batch for one NaN, so unusable factors are stood in for.
    S = torch.where(finite.view(-1, *[1] * (S.ndim - 1)), S, identity)
    try:
        results: list[Tensor | None] = list(function(S))
    except (DecompositionError, torch.linalg.LinAlgError):
        results = [_or_none(function, factor) for factor in S]
    good = finite.tolist()
    made = [result for result in results if result is not None]
    if made and not bool(is_finite(torch.stack(made)).all()):  # a factor at the edge of its dtype
        results = [r if r is not None and bool(is_finite(r[None])) else None for r in results]
    return [result if fine else None for result, fine in zip(results, good, strict=True)]


def is_finite(S: Tensor) -> Tensor:
    """Which factors of a batch can be used, [b]; one whose sum overflows cannot either."""
    return S.flatten(1).sum(1).isfinite()


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


def renewed(stack: Stack, name: str, results: Sequence[Tensor | None]) -> list[Layer]:
    """Cache new maps of a stack's blocks; a layer with a block that has none keeps its old ones."""
    failed, begin = [], 0
    for layer in stack.layers:
        blocks = [result for result in results[begin : begin + layer.blocks] if result is not None]
        begin += layer.blocks
        whole = torch.stack(blocks) if len(blocks) == layer.blocks else None
        failed += keep(layer, name, whole)
    return failed


def trace_mean(S: Tensor) -> Tensor:
    """tr(S)/d, [..., 1, 1]."""
    return S.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]


def identity_like(S: Tensor) -> Tensor:
    return torch.eye(S.shape[-1], dtype=S.dtype, device=S.device)
