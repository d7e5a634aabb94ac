"""Stacks: the layers of one shape as one tensor per quantity, so that one call computes all."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from gomuon.functional import linalg
from gomuon.functional.narrow import blocks_of, from_codes, to_codes
from gomuon.parameters.keeping import Keeping
from gomuon.parameters.layers import Layer, identity_or_ones, side_of
from gomuon.parameters.state import MOMENTUM, SCALES

Item = TypeVar("Item")


class Stack:
    """G, W, memories and maps of layers of one shape, [b, m, n] over all their blocks.

    Memories and maps are stacked once and stay stacked: the layers' states hold views of them. A
    stack is used as long as the same layers have gradients. What is kept in fewer bits is open, as
    computed, from its first use in a step until `close`.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.layers = layers
        self._sizes = [layer.blocks for layer in layers]
        # By name: the tensors in the layers' states, and the stacked tensor they are views of.
        self._kept: dict[str, tuple[Sequence[Tensor | None], Tensor]] = {}
        self._keeping = layers[0].keeping
        self._open: dict[str, Tensor] = {}
        self._G: Tensor | None = None
        self._usable: Tensor | None = None
        self.unusable: Tensor | None = None  # matrices that had a non-finite result, [b]
        self._direct = all(layer.is_direct for layer in layers)

    @property
    def shape(self) -> tuple[int, int]:
        return self.layers[0].shape

    @property
    def copies(self) -> int:
        """The number of ranks that compute these same layers; see `Layer.copies`."""
        return self.layers[0].copies

    @property
    def updates(self) -> int:
        """The number of updates of these layers, without the current one."""
        return self.layers[0].updates

    def count_update(self) -> None:
        """Count one more update."""
        for layer in self.layers:
            layer.state["updates"] = layer.updates + 1

    def begin_step(self, usable: Tensor | None) -> None:
        """`usable` is a scalar: if it is False, the gradients of this step count as zero."""
        self._usable = usable

    def end_step(self) -> None:
        """Drop the gradients of this step."""
        self._G = self._usable = None
        self.close()

    # ---- read ------------------------------------------------------------------------------------

    def parts(self, whole: Tensor) -> tuple[Tensor, ...]:
        """A stacked tensor, [b, …], divided among the layers."""
        return whole.split(self._sizes)

    @property
    def G(self) -> Tensor:
        """The gradients, [b, m, n]; stacked once per step."""
        if self._G is None:
            self._G = where_usable(
                self._usable, torch.cat([layer.gradients for layer in self.layers])
            )
        return self._G

    @property
    def W(self) -> Tensor:
        """A copy of the weights, [b, m, n]."""
        return torch.cat([layer.weights for layer in self.layers])

    def memory(self, name: str) -> Tensor:
        """An elementwise memory, [b, m, n], zeros at first. The caller writes to it in place."""
        if name in self._open:
            return self._open[name]
        whole = self._known(name)
        if whole is None:
            whole = torch.cat([layer.memory_or_zeros(name) for layer in self.layers])
            parts = zip(self.layers, whole.split(self._sizes), strict=True)
            self._kept[name] = [layer.set_memory(name, part) for layer, part in parts], whole
        working = self.layers[0].dtype
        if self._keeping is None or whole.dtype == working:
            return whole
        is_coded = whole.dtype == torch.int8
        opened = from_codes(whole, self._scales(), working) if is_coded else whole.to(working)
        self._open[name] = opened
        return opened

    def _scales(self) -> Tensor:
        """The scales of a momentum in 8 bits, [b, k]."""
        whole = self._known(SCALES)
        if whole is None:
            size = self.layers[0].shape[0] * self.layers[0].shape[1]
            device = self.layers[0].parameter.device
            zeros = torch.zeros(1, blocks_of(size), device=device)
            whole = torch.cat(
                [x.state.get(SCALES, zeros.expand(x.blocks, -1)) for x in self.layers]
            )
            self._place(SCALES, whole)
        return whole

    def factor(self, name: str, start: Tensor) -> Tensor:
        """A memory of another shape, [b, …], `start` at first. The caller writes in place."""
        as_computed = self._keeping is None or self._keeping.keeps_as_computed(name)
        whole = self._known(name) if as_computed else self._open.get(name)
        if whole is None:
            kept = [layer.computed(name) for layer in self.layers]
            starts = zip(kept, start.split(self._sizes), strict=True)
            whole = torch.cat([part if one is None else one for one, part in starts])
            if as_computed:
                self._place(name, whole)
            else:
                self._open[name] = whole
        return whole

    def set(self, name: str, whole: Tensor) -> None:
        """Store `whole` [b, …] as the layers' maps or factors with this name."""
        # Contiguous, as after loading: with other strides products differ in their last bits.
        whole = whole.contiguous()
        if self._keeping is not None:
            if self._keeping.is_offloaded(name):
                for layer, part in zip(self.layers, whole.split(self._sizes), strict=True):
                    layer.state[name] = layer.stored(name, part)
                return
            whole = self._keeping.stored(name, whole, self.updates)
        self._place(name, whole)

    def _place(self, name: str, whole: Tensor) -> None:
        """Put views of `whole` into the layers' states."""
        parts = list(whole.split(self._sizes))
        for layer, part in zip(self.layers, parts, strict=True):
            layer.state[name] = part
        self._kept[name] = parts, whole

    def close(self) -> None:
        """Keep what was opened in this step, in its fewer bits."""
        for name, value in self._open.items():
            if name != MOMENTUM:
                self.set(name, value)
                continue
            whole = self._known(name)
            assert whole is not None
            if whole.dtype == torch.int8:
                value, scales = to_codes(value)
                self._scales().copy_(scales)
            whole.copy_(value)
        self._open.clear()

    def set_maps(self, name: str, results: Sequence[Tensor | None]) -> list[Layer]:
        """Store new maps of the blocks. Returns layers that lack one; they keep their old maps."""
        failed, begin = [], 0
        for layer in self.layers:
            blocks = [made for made in results[begin : begin + layer.blocks] if made is not None]
            begin += layer.blocks
            whole = torch.stack(blocks) if len(blocks) == layer.blocks else None
            if not layer.set_map(name, whole):
                failed.append(layer)
        return failed

    def _known(self, name: str) -> Tensor | None:
        """The stacked tensor, unless a layer's state has got another tensor since."""
        if name not in self._kept:
            return None
        views, whole = self._kept[name]
        same = all(
            layer.state.get(name) is view for layer, view in zip(self.layers, views, strict=True)
        )
        return whole if same else None

    def map(self, name: str) -> Tensor | None:
        """Maps by name ("left_map", …), [b, …]; None if all of them are the identity."""
        if self._keeping is not None:
            return self._computed_map(name, self._keeping)
        return self._stored_map(name)

    def _computed_map(self, name: str, keeping: Keeping) -> Tensor | None:
        if name in self._open:
            return self._open[name]
        if keeping.is_offloaded(name):  # never stacked on the host, where it may not have arrived
            return self._stacked(name, [x.map_per_block(name, side_of(name)) for x in self.layers])
        whole = self._stored_map(name)
        return None if whole is None else whole.to(self.layers[0].dtype)

    def _stored_map(self, name: str) -> Tensor | None:
        whole = self._known(name)
        if whole is None:
            whole = self._stacked(
                name, [x.stored_per_block(name, side_of(name)) for x in self.layers]
            )
            if whole is None:
                return None
            for layer, part in zip(self.layers, whole.split(self._sizes), strict=True):
                kept = layer.state.get(name)
                if kept is not None and len(kept) == layer.blocks:
                    layer.state[name] = part
            self._kept[name] = [layer.state.get(name) for layer in self.layers], whole
        return whole

    def _stacked(self, name: str, maps: Sequence[Tensor | None]) -> Tensor | None:
        present = next((cached for cached in maps if cached is not None), None)
        if present is None:
            return None
        kind = name.partition("_")[2]
        return torch.cat(
            [
                identity_or_ones(present, kind).expand(layer.blocks, *present.shape[1:])
                if cached is None
                else cached
                for layer, cached in zip(self.layers, maps, strict=True)
            ]
        )

    # ---- guarded -----------------------------------------------------------------------------

    def remember(self, memory: Tensor, new: Tensor) -> Tensor:
        """`memory` ← `new` in place. Matrices of `new` that are not finite are left out.

        Otherwise one overflow would stay in the memory forever.
        """
        return memory.copy_(self.usable(new, memory))

    def usable(self, new: Tensor, instead: Tensor | float) -> Tensor:
        """The finite matrices of `new` [b, …], `instead` for the others. Waits for no device."""
        finite = new.flatten(1).sum(1).isfinite()
        if linalg.decomposes_well(new.device) and bool(finite.all()):
            return new  # on the host it can be asked
        self.unusable = ~finite if self.unusable is None else self.unusable | ~finite
        return torch.where(finite.view(-1, *[1] * (new.ndim - 1)), new, instead)

    def unusable_layers(self) -> list[Layer]:
        """Layers that had a non-finite result since the last call. Waits for the device."""
        if self.unusable is None:
            return []
        parts, self.unusable = self.unusable.split(self._sizes), None
        return [layer for layer, part in zip(self.layers, parts, strict=True) if bool(part.any())]

    # ---- write -----------------------------------------------------------------------------------

    def move(self, factor: float | Tensor, step: Tensor) -> None:
        """W ← factor·W − step."""
        parts = step.split(self._sizes)
        if not self._direct:
            for layer, part in zip(self.layers, parts, strict=True):
                layer.move(factor, part)
            return
        weights = [layer.tensor for layer in self.layers]
        if isinstance(factor, Tensor) or factor != 1:
            torch._foreach_mul_(weights, factor)
        torch._foreach_sub_(
            weights, [p.reshape(W.shape) for p, W in zip(parts, weights, strict=True)]
        )


def where_usable(usable: Tensor | None, gradient: Tensor) -> Tensor:
    """The gradient, or zero if the scalar `usable` is False. Does not wait."""
    if usable is None:
        return gradient
    return torch.where(usable.to(gradient.device, non_blocking=True), gradient, 0.0)


# ---- which layers are stacked together ----------------------------------------------------------


@dataclass
class Participants:
    """The layers and parameters of a group that a step updates; valid while `key` is the same.

    Attributes:
        key: identifies the parameters with gradients, and their states.
        stacks: the layers that this rank computes.
        others: the parameters that AdamW updates, with their states.
        matrices: the matrices of all ranks, if matrices have owners.
    """

    key: list[Any]
    stacks: list[Stack]
    others: list[tuple[Tensor, dict[str, Any]]]
    matrices: Sequence[Any] = ()

    @property
    def layers(self) -> list[Layer]:
        """The layers of all stacks."""
        return [layer for stack in self.stacks for layer in stack.layers]


# On the CPU a stack has at most this many elements, if it has more than one layer. From 32 MB on,
# the C library returns every freed tensor to the system, and to get it back takes longer than most
# operations on it.
_AT_ONCE = 2**22


def stacked(layers: Iterable[Layer]) -> list[Stack]:
    """Stacks of layers that can be computed together."""
    alike = group_by_key(layers, _stacking_key)
    return [Stack(batch) for same in alike for batch in _divided(same)]


def _divided(layers: Sequence[Layer]) -> Iterator[Sequence[Layer]]:
    """Layers of one shape, as many at a time as may be in a stack."""
    if layers[0].parameter.device.type != "cpu":
        yield layers
        return
    batch: list[Layer] = []
    for layer in layers:
        if batch and sum(one.parameter.numel() for one in (*batch, layer)) > _AT_ONCE:
            yield batch
            batch = []
        batch.append(layer)
    yield batch


def _stacking_key(layer: Layer) -> tuple[object, ...]:
    alike = layer.shape, layer.forms, layer.dtype, layer.parameter.device, layer.updates
    return *alike, layer.copies


def group_by_key(items: Iterable[Item], key: Callable[[Item], Hashable]) -> list[list[Item]]:
    """Lists of items with equal keys, in order of first appearance."""
    groups: dict[Hashable, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())
