"""What the hooks an optimizer places on a model have in common: how they are copied and removed."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


class PlacedHook:
    """A forward hook or pre-hook, on one module or several.

    A copied or pickled model has no optimizer yet, and a copied optimizer places hooks of its own:
    in a copy the hook becomes an `InertHook`.
    """

    def __init__(self) -> None:
        self.handles: list[RemovableHandle] = []

    def remove(self) -> None:
        """Take it off every module."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> "InertHook":
        return InertHook(self._number)

    def __reduce__(self) -> tuple[type["InertHook"], tuple[int]]:
        return InertHook, (self._number,)

    @property
    def _number(self) -> int:
        """The largest number under which a module knows it."""
        return max((handle.id for handle in self.handles), default=-1)

    @property
    def __name__(self) -> str:
        """Asked for by torch.jit.script, which compiles hooks from their source."""
        raise AttributeError(
            "torch.jit.script cannot compile a model with an optimizer's hooks: call "
            "optimizer.remove_hooks() first, and optimizer.attach(model) to go on training"
        )


class InertHook:
    """What a hook becomes in a copied or pickled model, until the model's first forward pass."""

    def __init__(self, number: int) -> None:
        self.number = number
        # In another process hooks are numbered anew; none may get this number, and with it the
        # note that it takes keyword arguments.
        RemovableHandle.next_id = max(RemovableHandle.next_id, number + 1)

    def __reduce__(self) -> tuple[type["InertHook"], tuple[int]]:
        return InertHook, (self.number,)

    def __call__(self, module: nn.Module, *passed: Any) -> None:
        if not torch.compiler.is_compiling():  # a graph has no business with the module's hooks
            self.leave(module)

    def leave(self, module: nn.Module) -> None:
        """Take itself off the module; torch walks over a copy of the hooks."""
        for hooks, with_kwargs in _hooks_of(module):
            for number in [number for number, hook in hooks.items() if hook is self]:
                hooks.pop(number)
                with_kwargs.pop(number, None)

    @property
    def __name__(self) -> str:
        raise AttributeError(
            "torch.jit.script cannot compile what an optimizer's hooks have become in a copied "
            "model; it goes with the copy's first forward pass: make one before torch.jit.script"
        )


def remove_inert_hooks(model: nn.Module) -> None:
    """Rid a copied or unpickled model of what is left of the original's hooks."""
    for module in model.modules():
        inert = {
            hook
            for hooks, _ in _hooks_of(module)
            for hook in hooks.values()
            if isinstance(hook, InertHook)
        }
        for hook in inert:
            hook.leave(module)


def _hooks_of(module: nn.Module) -> Iterator[tuple[dict[int, Any], dict[int, Any]]]:
    """A module's hooks by number, and which of them take keyword arguments; then its pre-hooks."""
    yield module._forward_hooks, module._forward_hooks_with_kwargs
    yield module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs
