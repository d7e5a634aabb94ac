"""Where the maps P_B and P_A come from: moments, regularised, averaged, rooted, cached per layer.

A geometry writes `left_map` and `right_map` (and whatever it averages) into each layer's state. It
never clears them: a layer that was not seen, or whose factor is unusable, keeps the maps it has,
which Corollary 2 certifies as exact for their own ball.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from gomuon.batching import alike
from gomuon.capture import Moment
from gomuon.errors import DecompositionError
from gomuon.functional import inverse_root, oas, shrink
from gomuon.layers import Layer
from gomuon.settings import sides

Group = Mapping[str, Any]


class Geometry(Protocol):
    """One choice on the geometry axis."""

    def captured_sides(self, group: Group) -> tuple[bool, bool]:
        """Whether (output gradients, inputs) must be captured on refresh steps."""
        ...

    def refresh(self, layers: Sequence[Layer], group: Group) -> list[Layer]:
        """Renew the maps of `layers`; returns those whose factor was unusable."""
        ...


class KroneckerMoments:
    """A = E[xxᵀ] of this refresh and B = E[δδᵀ] averaged over refreshes, both shrunk."""

    def captured_sides(self, group: Group) -> tuple[bool, bool]:
        left, right = sides(group["alpha"])
        return left > 0, right > 0

    def refresh(self, layers: Sequence[Layer], group: Group) -> list[Layer]:
        left, right = sides(group["alpha"])
        failed = _refresh_right(layers, group, right) if right > 0 else []
        failed += _refresh_left(layers, group, left) if left > 0 else []
        return failed


class PartnerGram:
    """Right map ½(WᵀW + λI)^(−1/2), head by head, W the weight a layer is multiplied with.

    For a query layer that is the key layer, and the other way round; the two moves share one
    budget, hence the ½. A reading of the paper's undefined "Q/K partner metric", after the nearest
    public definition (compositional Muon).
    """

    def captured_sides(self, group: Group) -> tuple[bool, bool]:
        return False, False

    def refresh(self, layers: Sequence[Layer], group: Group) -> list[Layer]:
        paired = [layer for layer in layers if layer.partner is not None]
        for batch in alike(paired, lambda layer: (layer.shape, layer.blocks, layer.dtype)):
            W = torch.stack([layer.matrices(_present(layer.partner)) for layer in batch])
            identity = torch.eye(W.shape[-1], dtype=W.dtype, device=W.device)
            maps = 0.5 * inverse_root(W.mT @ W + group["partner_damping"] * identity, 0.5)
            for layer, right_map in zip(batch, maps.unbind(), strict=True):
                layer.state["right_map"] = right_map.clone()
        return []


def _refresh_right(layers: Sequence[Layer], group: Group, alpha: float) -> list[Layer]:
    """A_t = OAS(Â_t), P_A = A_t^(−α): one factor and one root for all layers that read x."""
    seen = [layer for layer in layers if layer.statistics and layer.statistics.inputs]
    failed = []
    readers = alike(seen, lambda layer: id(_inputs(layer)))
    for batch in alike(readers, lambda same: (same[0].shape[1], same[0].dtype)):
        moments = [_inputs(same[0]) for same in batch]
        A = _regularise(*_mean(moments), group["shrinkage"])
        for same, right_map in zip(batch, _roots(A, alpha), strict=True):
            for layer in same:
                failed += _keep(layer, "right_map", right_map)
    return failed


def _refresh_left(layers: Sequence[Layer], group: Group, alpha: float) -> list[Layer]:
    """B_t = OAS(B̂_t), B̄_t = β_B^K·B̄_{t−K} + (1−β_B^K)·B_t (Equation 22), P_B = B̄_t^(−α)."""
    seen = [layer for layer in layers if layer.statistics and layer.statistics.gradients]
    failed = []
    for batch in alike(seen, lambda layer: (layer.shape[0], layer.blocks, layer.dtype)):
        mean, count = _mean([_gradients(layer) for layer in batch])
        if group["loss_reduction"] == "mean":
            # The loss averaged over N rows, so g_i = δ_i/N. Undone here, a short last batch enters
            # B̄ with the weight of any other.
            mean = mean * count.square()[:, None, None].to(mean.dtype)
        B = _regularise(_diagonal_blocks(mean, batch[0].blocks), count[:, None], group["shrinkage"])
        usable = torch.isfinite(B).flatten(1).all(1).tolist()
        for layer, observed, good in zip(batch, B.unbind(), usable, strict=True):
            if good:
                _average(layer.state, observed, group["factor_decay"], group["step"])
        known = [layer for layer in batch if "left_factor" in layer.state]
        averages = [layer.state["left_factor"] for layer in known]
        maps = _roots(torch.stack(averages), alpha) if known else []
        for layer, left_map in zip(known, maps, strict=True):
            failed += _keep(layer, "left_map", left_map)
        failed += [layer for layer, good in zip(batch, usable, strict=True) if not good]
    return failed


def _average(state: dict[str, Any], observed: Tensor, beta: float, step: int) -> None:
    """The first observation starts the average; later ones decay it by the steps elapsed."""
    if "left_factor" in state:
        # β_B^K on schedule; a layer that missed refreshes has waited longer.
        decay = beta ** (step - state["refreshed"])
        observed = decay * state["left_factor"] + (1 - decay) * observed
    state["left_factor"] = observed.clone()
    state["refreshed"] = step


def _mean(moments: Sequence[Moment]) -> tuple[Tensor, Tensor]:
    """Σvvᵀ/N stacked [b, d, d], and N [b]."""
    total = torch.stack([moment.total for moment in moments])
    count = torch.stack([moment.count for moment in moments])
    return total / count[:, None, None].to(total.dtype), count


def _regularise(S: Tensor, count: Tensor, shrinkage: str | float) -> Tensor:
    return oas(S, count)[0] if shrinkage == "oas" else shrink(S, float(shrinkage))


def _roots(S: Tensor, power: float) -> list[Tensor | None]:
    """Inverse roots of a batch; None where a factor is not finite or does not decompose."""
    finite = torch.isfinite(S).flatten(1).all(1)
    identity = torch.eye(S.shape[-1], dtype=S.dtype, device=S.device)
    # LAPACK refuses a whole batch for one NaN, so unusable factors are stood in for.
    S = torch.where(finite.view(-1, *[1] * (S.ndim - 1)), S, identity)
    try:
        # Clones, not views, any one of which would keep the whole batch alive.
        roots: list[Tensor | None] = [root.clone() for root in inverse_root(S, power)]
    except DecompositionError:
        roots = [_root_or_none(factor, power) for factor in S.unbind()]
    return [root if good else None for root, good in zip(roots, finite.tolist(), strict=True)]


def _root_or_none(S: Tensor, power: float) -> Tensor | None:
    try:
        return inverse_root(S, power)
    except DecompositionError:
        return None


def _keep(layer: Layer, name: str, value: Tensor | None) -> list[Layer]:
    """Cache a new map, or report the layer and leave the old one (Corollary 2)."""
    if value is None:
        return [layer]
    layer.state[name] = value
    return []


def _diagonal_blocks(S: Tensor, blocks: int) -> Tensor:
    """[b, d, d] -> [b, blocks, d/blocks, d/blocks]."""
    size = S.shape[-1] // blocks
    tiles = S.reshape(-1, blocks, size, blocks, size)
    return tiles.diagonal(dim1=1, dim2=3).movedim(-1, 1)


def _inputs(layer: Layer) -> Moment:
    assert layer.statistics is not None
    return _present(layer.statistics.inputs)


def _gradients(layer: Layer) -> Moment:
    assert layer.statistics is not None
    return _present(layer.statistics.gradients)


def _present(value: Any) -> Any:
    assert value is not None
    return value
