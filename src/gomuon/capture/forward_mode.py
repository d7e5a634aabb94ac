"""A function mode that is entered while a model runs forward: hooks that enter and leave it."""

import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, _len_torch_function_stack, _pop_mode, _push_mode

from gomuon.capture.placed import PlacedHook

# Functions written in Python, whose body has the products.
_COMPOSED = {F.multi_head_attention_forward}


class ForwardWatch(Protocol):
    """What the hooks tell about a forward pass."""

    @property
    def open(self) -> bool:
        """Whether anything is watched in this step."""

    @property
    def is_inside(self) -> bool:
        """Whether a module is running."""

    def enter(self, module: nn.Module) -> None:
        """Before a module's forward pass."""

    def leave(self, module: nn.Module) -> None:
        """After a module's forward pass, also one that raised."""


class ForwardHooks:
    """The hooks of one watch on the modules around what it watches."""

    def __init__(self, watch: ForwardWatch) -> None:
        self._both: tuple[PlacedHook, PlacedHook] = _EnterHook(watch), _LeaveHook(watch)

    def place(self, modules: Iterable[nn.Module]) -> None:
        """Hook these modules."""
        enter, leave = self._both
        for module in modules:
            enter.handles.append(module.register_forward_pre_hook(enter))  # type: ignore[arg-type]
            leave.handles.append(module.register_forward_hook(leave, always_call=True))  # type: ignore[arg-type]

    def remove(self) -> None:
        """Take the hooks off their modules."""
        for hook in self._both:
            hook.remove()


class _EnterHook(PlacedHook):
    """A forward pre-hook. On a reuse step, and in a compiled graph, it returns at once."""

    def __init__(self, watch: ForwardWatch) -> None:
        super().__init__()
        self.watch = watch

    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or not self.watch.open:
            return
        self.watch.enter(module)


class _LeaveHook(PlacedHook):
    """The forward hook that belongs to it."""

    def __init__(self, watch: ForwardWatch) -> None:
        super().__init__()
        self.watch = watch

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not self.watch.is_inside:
            return
        self.watch.leave(module)


class CallMode(TorchFunctionMode):
    """Hands every function of torch that is called to `call(func, args, kwargs)`, to run it.

    In a compiled graph it does nothing.
    """

    def __init__(self, call: Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]) -> None:
        super().__init__()
        self._call = call

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        if func in _COMPOSED:
            with self:
                return _without_dispatch(func)(*args, **kwargs)
        return self._call(func, args, kwargs)


def push_mode(mode: TorchFunctionMode) -> None:
    """Enter a mode."""
    _push_mode(mode)


def remove_mode(mode: TorchFunctionMode) -> None:
    """Take a mode off torch's stack, wherever it is, as often as it is there."""
    kept = [_pop_mode() for _ in range(_len_torch_function_stack())]
    for other in reversed(kept):
        if other is not mode:
            _push_mode(other)


def _without_dispatch(func: Any) -> Callable[..., Any]:
    """A function of torch without its first check, which would call the mode again."""
    names = {**func.__globals__, "has_torch_function": _never}
    made = types.FunctionType(
        func.__code__, names, func.__name__, func.__defaults__, func.__closure__
    )
    made.__kwdefaults__ = func.__kwdefaults__
    return made


def _never(_: Any) -> bool:
    return False
