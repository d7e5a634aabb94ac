"""Views of watched weights: which part of which weight a tensor is.

A view is known by the functions that made it, such as W[e], W.T and W.chunk(2), and never by where
its memory is. Each function is applied once more to a tensor without memory; the strides of that
one say where the elements come from. Copies that change the dtype or the device count as views.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gomuon.parameters.sharding import is_sharded

T: Any = Tensor
_RESHAPING: set[Any] = {
    T.T.__get__,
    T.mT.__get__,
    *(
        getattr(home, name)
        for home in (torch, T)
        for name in (
            "transpose", "t", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "reshape",
            "flatten", "unflatten", "squeeze", "unsqueeze", "chunk", "split", "tensor_split",
            "unbind", "narrow", "select", "view", "expand", "view_as", "expand_as", "adjoint",
        )
        if hasattr(home, name)
    ),
}  # fmt: skip
_COPYING: set[Any] = {
    getattr(home, name)
    for home in (torch, T)
    for name in (
        "contiguous", "clone", "to", "type", "type_as", "float", "double", "half", "bfloat16",
        "cuda", "cpu",
    )
    if hasattr(home, name)
}  # fmt: skip
VIEWS = frozenset(_RESHAPING | _COPYING | {T.__getitem__, torch.index_select, T.index_select})


@dataclass(frozen=True)
class View:
    """Which elements of a weight a tensor has.

    Attributes:
        weight: the optimizer's parameter.
        shadow: a tensor on the meta device whose strides say which elements.
        numbers: the matrices of the first dimension, if they were chosen by a tensor of numbers.
    """

    weight: Tensor
    shadow: Tensor
    numbers: Tensor | None = None


def whole_view(weight: Tensor, shape: Sequence[int]) -> View:
    """The view of all of a weight."""
    return View(weight, torch.empty(tuple(shape), device="meta", dtype=torch.uint8))


def views_of(
    view: View, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], made: Any
) -> list[tuple[Tensor, View]]:
    """What a function made of a view, with the view that each of its results is.

    Empty if the results are not views of the weight any more.
    """
    if func in _COPYING:
        same = isinstance(made, Tensor) and made.shape == view.shadow.shape
        return [(made, view)] if same and not is_sharded(made) else []
    if view.numbers is not None:
        return []  # of gathered matrices only copies are followed
    if func in (T.index_select, torch.index_select):
        return _gathered(view, args[2], made) if len(args) == 3 and args[1] == 0 else []
    if func is T.__getitem__:
        index = args[1]
        if isinstance(index, Tensor) and index.ndim == 1 and not index.is_floating_point():
            return [] if index.dtype == torch.bool else _gathered(view, index, made)
        args = args[0], _plain_index(index)
    try:
        shadows = func(view.shadow, *args[1:], **kwargs)
    except (RuntimeError, TypeError, IndexError):
        return []
    both = [(made, shadows)] if isinstance(made, Tensor) else list(zip(made, shadows, strict=True))
    root = _root(view.shadow)
    return [
        (result, replace(view, shadow=shadow))
        for result, shadow in both
        if isinstance(result, Tensor) and result.shape == shadow.shape and _root(shadow) is root
    ]


def _gathered(view: View, numbers: Tensor, made: Any) -> list[tuple[Tensor, View]]:
    matrices = view.shadow.ndim == 3 and isinstance(made, Tensor) and made.ndim == 3
    return [(made, replace(view, numbers=numbers))] if matrices else []


def _plain_index(index: Any) -> Any:
    """An index for a tensor without memory: numbers in place of tensors with one number."""
    if isinstance(index, tuple):
        return tuple(_plain_index(part) for part in index)
    is_number = isinstance(index, Tensor) and not index.ndim and index.dtype != torch.bool
    return int(index) if is_number and not index.is_floating_point() else index


def _root(shadow: Tensor) -> Tensor:
    return shadow if shadow._base is None else shadow._base
