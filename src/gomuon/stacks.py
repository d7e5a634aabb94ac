"""Layers of one shape as one tensor per quantity, so that one call serves them all."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gomuon.layers import Layer


class Stack:
    """G, W, memories and maps of layers of one shape, [b, m, n] over all their blocks.

    What lasts (memories, maps) is stacked once and stays so: the layers' states hold views of it.
    A stack lives as long as the same layers take part.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.layers = layers
        self._sizes = [layer.blocks for layer in layers]
        # What the layers' states hold of each, and the stack it is a view of.
        self._kept: dict[str, tuple[Sequence[Tensor | None], Tensor]] = {}
        self._G: Tensor | None = None
        self.unusable: Tensor | None = None  # matrices with a result that was not finite, [b]
        self._direct = all(layer.is_direct for layer in layers)

    @property
    def shape(self) -> tuple[int, int]:
        return self.layers[0].shape

    @property
    def updates(self) -> int:
        """Updates these layers have had; the one in progress counts once it has been counted."""
        return self.layers[0].updates

    def count(self) -> None:
        """One more update."""
        for layer in self.layers:
            layer.state["updates"] = layer.updates + 1

    def end(self) -> None:
        """Let go of what belongs to one step."""
        self._G = None

    # ---- read ------------------------------------------------------------------------------------

    @property
    def G(self) -> Tensor:
        """The gradients, [b, m, n]; stacked once a step."""
        if self._G is None:
            self._G = torch.cat([layer.gradients for layer in self.layers])
        return self._G

    @property
    def W(self) -> Tensor:
        """A copy of the weights, [b, m, n]."""
        return torch.cat([layer.weights for layer in self.layers])

    def memory(self, name: str) -> Tensor:
        """An elementwise memory, [b, m, n], zero at first; written to in place."""
        whole = self._known(name)
        if whole is None:
            whole = torch.cat([layer.recall(name) for layer in self.layers])
            parts = zip(self.layers, whole.split(self._sizes), strict=True)
            self._kept[name] = [layer.keep(name, part) for layer, part in parts], whole
        return whole

    def factor(self, name: str, start: Tensor) -> Tensor:
        """A memory of another shape, [b, …], `start` at first; written to in place."""
        whole = self._known(name)
        if whole is None:
            starts = zip(self.layers, start.split(self._sizes), strict=True)
            whole = torch.cat([layer.state.get(name, part) for layer, part in starts])
            self.set(name, whole)
        return whole

    def set(self, name: str, whole: Tensor) -> None:
        """Make `whole` [b, …] the layers' maps or factors of that name."""
        # As a checkpoint gives it back: products of another layout differ in their last bits.
        whole = whole.contiguous()
        parts = list(whole.split(self._sizes))
        for layer, part in zip(self.layers, parts, strict=True):
            layer.state[name] = part
        self._kept[name] = parts, whole

    def _known(self, name: str) -> Tensor | None:
        """What is kept stacked, unless a layer's state was given another tensor since."""
        if name not in self._kept:
            return None
        views, whole = self._kept[name]
        same = all(
            layer.state.get(name) is view for layer, view in zip(self.layers, views, strict=True)
        )
        return whole if same else None

    def map(self, name: str) -> Tensor | None:
        """Cached maps by name ("left_map", …), [b, …]; None when every one is the identity."""
        whole = self._known(name)
        if whole is None and (whole := self._stacked(name)) is not None:
            for layer, part in zip(self.layers, whole.split(self._sizes), strict=True):
                kept = layer.state.get(name)
                if kept is not None and len(kept) == layer.blocks:
                    layer.state[name] = part
            self._kept[name] = [layer.state.get(name) for layer in self.layers], whole
        return whole

    def _stacked(self, name: str) -> Tensor | None:
        side, _, kind = name.partition("_")
        maps = [layer.spread(name, side) for layer in self.layers]
        present = next((cached for cached in maps if cached is not None), None)
        if present is None:
            return None
        return torch.cat(
            [
                _neutral(present, kind).expand(layer.blocks, *present.shape[1:])
                if cached is None
                else cached
                for layer, cached in zip(self.layers, maps, strict=True)
            ]
        )

    # ---- guarded -----------------------------------------------------------------------------

    def remember(self, memory: Tensor, new: Tensor) -> Tensor:
        """`memory` ← `new` in place, but for matrices that are not finite: those stay as they were.

        One overflow must not stay in a memory for ever.
        """
        return memory.copy_(self.usable(new, memory))

    def usable(self, new: Tensor, instead: Tensor | float) -> Tensor:
        """`new` [b, …] where it is finite, else `instead`; nothing is read from the device."""
        finite = new.flatten(1).sum(1).isfinite()
        self.unusable = ~finite if self.unusable is None else self.unusable | ~finite
        return torch.where(finite.view(-1, *[1] * (new.ndim - 1)), new, instead)

    def unusable_layers(self) -> list[Layer]:
        """Layers with a result that was not finite since the last call; waits for the device."""
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
        weights = [layer.parameter for layer in self.layers]
        if isinstance(factor, Tensor) or factor != 1:
            torch._foreach_mul_(weights, factor)
        torch._foreach_sub_(
            weights, [p.reshape(W.shape) for p, W in zip(parts, weights, strict=True)]
        )


@dataclass
class Roll:
    """Who takes part in a group's steps, for as long as `key` stays the same."""

    key: list[Any]
    stacks: list[Stack]
    others: list[Tensor]
    matrices: Sequence[Any] = ()  # of all ranks, where they share the work


def _neutral(like: Tensor, kind: str) -> Tensor:
    """What a layer without geometry uses: the identity, or ones for what multiplies elementwise."""
    if kind in ("map", "basis"):
        return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)
    return torch.ones_like(like[:1])
