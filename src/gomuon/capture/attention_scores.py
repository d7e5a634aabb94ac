"""Attention that is written out: scores = q kᵀ, scaled and masked, then a softmax."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gomuon.capture.products import parse_of
from gomuon.capture.views import VIEWS

_T: Any = Tensor


def _named(*names: str) -> set[Any]:
    return {getattr(home, name) for home in (torch, _T, F) for name in names if hasattr(home, name)}


SOFTMAX = _named("softmax")
_TIMES = _named("mul", "multiply", "mul_", "__mul__", "__rmul__", "__imul__")
_OVER = _named("div", "divide", "true_divide", "div_", "__truediv__", "__itruediv__", "__div__")
_ADDED = _named(
    "add", "add_", "__add__", "__radd__", "__iadd__", "sub", "sub_", "__sub__", "__isub__",
    "masked_fill", "masked_fill_", "where",
)  # fmt: skip
_KEPT = VIEWS | _named("detach") - {_T.__getitem__}
_WITH_FACTOR = _named("baddbmm")


@dataclass(frozen=True)
class Scores:
    """Products of queries and keys.

    Attributes:
        query: [..., heads, l, d].
        key: [..., heads, l', d].
        factor: what they were multiplied with since.
        lost: the name of a function that changed them in a way that is not known.
    """

    query: Tensor
    key: Tensor
    factor: float | Tensor = 1.0
    lost: str = ""


def scores_of(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> Scores | None:
    """The scores that a function has made of queries and keys; None if it made none."""
    parse: Callable[..., Any] | None = parse_of(func)
    if parse is None or func is F.linear or not isinstance(result, Tensor) or result.ndim < 3:
        return None
    if not result.requires_grad:
        return None
    factor = 1.0
    if func in _WITH_FACTOR:
        names = ("input", "batch1", "batch2")[len(args) :]
        args = [*args, *(kwargs[name] for name in names if name in kwargs)]
        factor, kwargs = float(kwargs.get("alpha", 1)), {}
    product = parse(args, kwargs)
    if product is None or product.ends is not None or len(product.labels) < 3:
        return None
    left, right = product.left_labels, product.right_labels
    *batch, row, column = product.labels
    summed = [label for label in left if label in right and label not in product.labels]
    if len(summed) != 1 or row in right or column in left:
        return None
    query = _ordered(product.left, left, [*batch, row, *summed])
    key = _ordered(product.right, right, [*batch, column, *summed])
    return None if query is None or key is None else Scores(query, key, factor)


def _ordered(tensor: Tensor, labels: Sequence[Any], wanted: Sequence[Any]) -> Tensor | None:
    """The tensor with its dimensions in this order; one of length one may stand for any other."""
    places = {label: place for place, label in enumerate(labels) if label in wanted}
    alone = [place for place, label in enumerate(labels) if label not in wanted]
    missing = [label for label in wanted if label not in places]
    if len(missing) != len(alone) or any(tensor.shape[place] != 1 for place in alone):
        return None
    places |= dict(zip(missing, alone, strict=True))
    return tensor.detach().permute([places[label] for label in wanted])


def followed(scores: Scores, func: Any, args: Sequence[Any], result: Tensor) -> Scores | None:
    """The scores after another function; None if its result cannot be scores."""
    if result.numel() != scores.query.shape[:-1].numel() * scores.key.shape[-2]:
        return None
    if func in _KEPT or func in _ADDED:
        return scores
    if func in _TIMES or func in _OVER:
        other = next((arg for arg in args if not _is_scores(arg, result)), None)
        if isinstance(other, Tensor):
            other = other.detach() if other.numel() == 1 else None
        if isinstance(other, (int, float, Tensor)):
            factor = scores.factor / other if func in _OVER else scores.factor * other
            return replace(scores, factor=factor)
    if parse_of(func) is not None:
        return None  # a product of them is no longer scores
    return replace(scores, lost=scores.lost or getattr(func, "__name__", str(func)))


def _is_scores(value: Any, result: Tensor) -> bool:
    return isinstance(value, Tensor) and value.numel() == result.numel() > 1
