"""Whether cached maps still give nearly the step of fresh ones, for clocks that adapt.

The efficiency of Proposition 7 divides by the radius of the cached direction, which is that of its
worst singular direction. Between two batches of one distribution it is far below one already, so it
says more about noise than about age (docs/adaptive.md). The cosine of the two steps is a mean over
all singular directions. It needs products and polar factors alone, and no inverse of a map.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gomuon.functional.factors import RootBatch
from gomuon.functional.oracle import Maps, step_efficiency
from gomuon.functional.polar_factor import PolarMethod
from gomuon.geometry.base import Group
from gomuon.geometry.moments_to_maps import SharedStore, not_none
from gomuon.parameters.layers import Layer, side_of
from gomuon.parameters.stacks import Stack
from gomuon.parameters.state import MOMENTUM

MAPS = ("left_map", "right_map")
TOO_LOW, HIGH_ENOUGH, NOT_MEASURED = range(3)
FreshMap = Callable[[Layer, str], Tensor | None]


@dataclass(frozen=True)
class CachedMaps:
    """The maps of a layer before a refresh, by name, as they are kept and as steps use them."""

    layer: Layer
    kept: dict[str, Tensor]
    used: dict[str, Tensor]


@dataclass(frozen=True)
class Measured:
    """Layers of one stack, and what was found of each, [layers], not read yet."""

    layers: Sequence[Layer]
    outcomes: Tensor

    def tell(self, outcomes: Sequence[int]) -> None:
        """Tell each layer what was read."""
        for layer, outcome in zip(self.layers, outcomes, strict=True):
            layer.holds = None if outcome == NOT_MEASURED else outcome == HIGH_ENOUGH


def tell(measured: Iterable[Measured]) -> None:
    """Read what was measured, and tell the layers."""
    for found in measured:
        found.tell(found.outcomes.tolist())


def cached_maps(layers: Sequence[Layer]) -> list[CachedMaps]:
    """The maps that a refresh will replace."""
    found = []
    for layer in layers:
        kept = {name: layer.state[name] for name in MAPS if name in layer.state}
        if kept and MOMENTUM in layer.state:
            used = {name: layer.computed(name) for name in kept}
            found.append(CachedMaps(layer, kept, {n: P for n, P in used.items() if P is not None}))
    return found


def measure(
    cached: Sequence[CachedMaps], fresh: FreshMap, stacks: Sequence[Stack], group: Group
) -> Iterator[Measured]:
    """Compare the steps of cached and fresh maps, for the momentum before this step.

    A layer is left out if a map was not replaced. Nothing waits for the device.
    """
    compared = {one.layer: _Compared(one.used, _new_maps(one, fresh)) for one in cached}
    for stack in stacks:
        alike: dict[tuple[str, ...], list[Layer]] = {}
        for layer in stack.layers:
            if layer in compared and compared[layer].new:
                alike.setdefault(tuple(compared[layer].new), []).append(layer)
        for layers in alike.values():
            yield _measured(layers, [compared[layer] for layer in layers], stack, group)


@dataclass(frozen=True)
class _Compared:
    """Maps of a layer before and after a refresh, by name."""

    old: dict[str, Tensor]
    new: dict[str, Tensor]


def _new_maps(cached: CachedMaps, fresh: FreshMap) -> dict[str, Tensor]:
    """The maps that replace the cached ones; none unless all of them are replaced."""
    found = {name: fresh(cached.layer, name) for name in cached.kept}
    new = {name: P for name, P in found.items() if P is not None}
    return new if len(new) == len(found) else {}


def _measured(
    layers: Sequence[Layer], compared: Sequence[_Compared], stack: Stack, group: Group
) -> Measured:
    """The outcome of layers of a stack that have maps on the same sides."""
    momenta = dict(zip(stack.layers, stack.parts(stack.memory(MOMENTUM)), strict=True))
    M = torch.cat([momenta[layer] for layer in layers])
    cached, fresh = (
        _of_all_blocks(layers, [getattr(one, when) for one in compared]) for when in ("old", "new")
    )
    # What "svd" makes of a null space is arbitrary, and differs between the two.
    polar: PolarMethod = "exact" if group["polar"] == "svd" else group["polar"]
    found = step_efficiency(M, cached, fresh, polar_method=polar)
    least = torch.stack(
        [
            torch.where(part.isfinite(), part, torch.inf).amin()
            for part in found.split([layer.blocks for layer in layers])
        ]
    )
    holds = torch.where(least >= group["refresh_every"].efficiency, HIGH_ENOUGH, TOO_LOW)
    return Measured(layers, torch.where(least.isinf(), NOT_MEASURED, holds))


def _of_all_blocks(layers: Sequence[Layer], maps: Sequence[dict[str, Tensor]]) -> Maps:
    """The left and the right maps of all blocks of these layers; None is the identity."""
    left, right = (
        torch.cat(
            [
                not_none(layer.per_block(own[name], side_of(name)))
                for layer, own in zip(layers, maps, strict=True)
            ]
        )
        if name in maps[0]
        else None
        for name in MAPS
    )
    return left, right


def replaced_maps(cached: Sequence[CachedMaps]) -> FreshMap:
    """The maps of layers after a refresh; None if they are still those from before."""
    before = {one.layer: one.kept for one in cached}

    def fresh(layer: Layer, name: str) -> Tensor | None:
        same = layer.state.get(name) is before[layer][name]
        return None if same else layer.computed(name)

    return fresh


def roots_to_be_stored(batches: Sequence[RootBatch]) -> FreshMap | None:
    """The same before it is known which roots can be used; None if not all are products."""
    found: dict[tuple[Layer, str], Tensor] = {}
    for batch in batches:
        if batch.products is None or not isinstance(batch.store, SharedStore):
            return None
        for root, same in zip(batch.products[0], batch.store.layers, strict=True):
            name = batch.store.name
            found |= {(layer, name): same[0].kept_where_unseen(name, root) for layer in same}
    return lambda layer, name: found.get((layer, name))
