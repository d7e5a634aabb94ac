"""The base class of an optimizer's hooks on a model: how they are copied and removed."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


class PlacedHook:
    """A forward hook or pre-hook, on one module or several.

    In a copied or pickled model the hook becomes an `InertHook`: the copy has no optimizer yet, and
    a copied optimizer places its own hooks.
    """

    def __init__(self) -> None:
        self.handles: list[RemovableHandle] = []

    def remove(self) -> None:
        """Remove the hook from every module."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> "InertHook":
        return InertHook(self._largest_id)

    def __reduce__(self) -> tuple[type["InertHook"], tuple[int]]:
        return InertHook, (self._largest_id,)

    @property
    def _largest_id(self) -> int:
        """The largest of the ids that its modules know it by."""
        return max((handle.id for handle in self.handles), default=-1)

    @property
    def __name__(self) -> str:
        """torch.jit.script reads this, because it compiles hooks from their source."""
        raise AttributeError(
            "torch.jit.script cannot compile a model with an optimizer's hooks: call "
            "optimizer.remove_hooks() first, and optimizer.attach(model) to continue training"
        )


class InertHook:
    """Replaces a hook in a copied or pickled model until the model's first forward pass."""

    def __init__(self, number: int) -> None:
        self.number = number
        # Another process numbers its hooks from 0. No new hook may get this number: the module
        # has noted that the hook with this number takes keyword arguments.
        RemovableHandle.next_id = max(RemovableHandle.next_id, number + 1)

    def __reduce__(self) -> tuple[type["InertHook"], tuple[int]]:
        return InertHook, (self.number,)

    def __call__(self, module: nn.Module, *passed: Any) -> None:
        if not torch.compiler.is_compiling():  # a graph must not change the module's hooks
            self.remove_from(module)

    def remove_from(self, module: nn.Module) -> None:
        """Remove this hook from the module. Safe inside a call: torch iterates over a copy."""
        for hooks, with_kwargs in _hooks_of(module):
            for number in [number for number, hook in hooks.items() if hook is self]:
                hooks.pop(number)
                with_kwargs.pop(number, None)

    @property
    def __name__(self) -> str:
        raise AttributeError(
            "torch.jit.script cannot compile a copied model that still has the placeholders of an "
            "optimizer's hooks; its first forward pass removes them: run one before "
            "torch.jit.script"
        )


def remove_inert_hooks(model: nn.Module) -> None:
    """Remove all inert hooks from a copied or unpickled model."""
    for module in model.modules():
        inert = {
            hook
            for hooks, _ in _hooks_of(module)
            for hook in hooks.values()
            if isinstance(hook, InertHook)
        }
        for hook in inert:
            hook.remove_from(module)


def _hooks_of(module: nn.Module) -> Iterator[tuple[dict[int, Any], dict[int, Any]]]:
    """Hooks by number and which take keyword arguments: first hooks, then pre-hooks."""
    yield module._forward_hooks, module._forward_hooks_with_kwargs
    yield module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs
