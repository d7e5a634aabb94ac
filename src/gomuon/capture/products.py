"""Products of tensors in one notation: labels for the dimensions, as in `torch.einsum`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Label = int | str
Labels = tuple[Label, ...]


@dataclass(frozen=True)
class LabelledProduct:
    """The product of two tensors.

    Attributes:
        left: the first tensor.
        right: the second tensor.
        left_labels: one for each dimension of the first tensor.
        right_labels: of the second one.
        labels: of the result.
        ends: of the segments of rows, for a grouped product.
        rows_label: the label that the segments divide.
        stack_label: the label that counts the segments.
    """

    left: Tensor
    right: Tensor
    left_labels: Labels
    right_labels: Labels
    labels: Labels
    ends: Tensor | None = None
    rows_label: Label | None = None
    stack_label: Label | None = None


Parse = Callable[[Sequence[Any], Mapping[str, Any]], LabelledProduct | None]


def _two(args: Sequence[Any], kwargs: Mapping[str, Any], *names: str) -> list[Any]:
    """Positional arguments, or keyword arguments with these names."""
    found = [*args, *(kwargs[name] for name in names[len(args) :] if name in kwargs)]
    return found[: len(names)]


def _matmul(a: Tensor, b: Tensor) -> LabelledProduct | None:
    """As `torch.matmul`: leading dimensions are aligned at their ends."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor) and a.ndim and b.ndim):
        return None
    of_a: list[Label] = ["k"] if a.ndim == 1 else ["i", "k"]
    of_b: list[Label] = ["k"] if b.ndim == 1 else ["k", "j"]
    result: list[Label] = [*(["i"] if a.ndim > 1 else []), *(["j"] if b.ndim > 1 else [])]
    alone = count(-1, -1)  # labels of dimensions of length one, which are repeated
    lead_a, lead_b = a.ndim - len(of_a), b.ndim - len(of_b)
    for place in range(max(lead_a, lead_b)):
        size_a = a.shape[lead_a - 1 - place] if place < lead_a else None
        size_b = b.shape[lead_b - 1 - place] if place < lead_b else None
        if size_a is not None:
            of_a.insert(0, place if size_a > 1 or size_b in (None, 1) else next(alone))
        if size_b is not None:
            of_b.insert(0, place if size_b > 1 or size_a in (None, 1) else next(alone))
        result.insert(0, place)
    return LabelledProduct(a, b, tuple(of_a), tuple(of_b), tuple(result))


def _parse_matmul(args: Sequence[Any], kwargs: Mapping[str, Any]) -> LabelledProduct | None:
    given = _two(args, kwargs, "input", "other")
    given = given if len(given) == 2 else _two(args, kwargs, "input", "mat2")
    return _matmul(*given) if len(given) == 2 else None


def _parse_reversed(args: Sequence[Any], kwargs: Mapping[str, Any]) -> LabelledProduct | None:
    return _matmul(args[1], args[0]) if len(args) == 2 else None


def _parse_linear(args: Sequence[Any], kwargs: Mapping[str, Any]) -> LabelledProduct | None:
    given = _two(args, kwargs, "input", "weight")
    if len(given) < 2 or given[1].ndim != 2:
        return None
    x, weight = given
    positions: Labels = tuple(range(x.ndim - 1))
    return LabelledProduct(x, weight, (*positions, "k"), ("j", "k"), (*positions, "j"))


def _parse_addmm(args: Sequence[Any], kwargs: Mapping[str, Any]) -> LabelledProduct | None:
    if len(args) != 3 or kwargs.get("alpha", 1) != 1:
        return None
    return _matmul(args[1], args[2])


def _parse_einsum(args: Sequence[Any], kwargs: Mapping[str, Any]) -> LabelledProduct | None:
    equation, *operands = args
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = list(operands[0])
    if not isinstance(equation, str) or len(operands) != 2:
        return None
    given, arrow, result = equation.replace(" ", "").partition("->")
    texts = given.split(",")
    if len(texts) != 2:
        return None
    labels = [_expanded(text, operand.ndim) for text, operand in zip(texts, operands, strict=True)]
    if any(len(set(own)) < len(own) for own in labels):
        return None  # a diagonal
    together = [*labels[0], *labels[1]]
    if arrow:
        dots = sorted({label for label in together if isinstance(label, int)}, reverse=True)
        before, dotted, after = result.partition("...")
        made: Labels = (*before, *(dots if dotted else ()), *after)
    else:
        once = {label for label in together if together.count(label) == 1}
        letters = sorted(label for label in once if isinstance(label, str))
        dots = sorted({label for label in together if isinstance(label, int)}, reverse=True)
        made = (*dots, *letters)
    return LabelledProduct(operands[0], operands[1], labels[0], labels[1], made)


def _expanded(text: str, dims: int) -> Labels:
    """Labels of an operand; those of an ellipsis are numbers, counted from its end."""
    before, dotted, after = text.partition("...")
    hidden = dims - len(before) - len(after) if dotted else 0
    return (*before, *range(hidden - 1, -1, -1), *after)


def _parse_bilinear(args: Sequence[Any], kwargs: Mapping[str, Any]) -> LabelledProduct | None:
    """y = W vec(x₁ x₂ᵀ): a linear layer that reads products of inputs."""
    given = _two(args, kwargs, "input1", "input2", "weight")
    if len(given) < 3:
        return None
    one, other, weight = given
    x = one.detach().unsqueeze(-1) * other.detach().unsqueeze(-2)
    positions: Labels = tuple(range(one.ndim - 1))
    return LabelledProduct(x, weight, (*positions, "k", "l"), ("j", "k", "l"), (*positions, "j"))


def _parse_grouped(args: Sequence[Any], kwargs: Mapping[str, Any]) -> LabelledProduct | None:
    """As `torch._grouped_mm`: segments of the rows of a, one for each matrix of b."""
    given = _two(args, kwargs, "self", "mat2", "offs")
    given = given if len(given) > 1 else _two(args, kwargs, "mat_a", "mat_b", "offs")
    ends = given[2] if len(given) > 2 else kwargs.get("offs")
    if len(given) < 2 or given[1].ndim != 3:
        return None
    a, b = given[:2]
    if a.ndim == 3 and ends is None:
        return _matmul(a, b)
    if a.ndim != 2 or not isinstance(ends, Tensor):
        return None
    return LabelledProduct(a, b, ("i", "k"), ("e", "k", "j"), ("i", "j"), ends, "i", "e")


PRODUCTS: dict[Any, Parse] = {
    F.linear: _parse_linear,
    F.bilinear: _parse_bilinear,
    torch.bilinear: _parse_bilinear,
    torch.einsum: _parse_einsum,
    Tensor.__matmul__: _parse_matmul,
    Tensor.__rmatmul__: _parse_reversed,
    **{
        getattr(home, name): _parse_matmul
        for home in (torch, Tensor)
        for name in ("matmul", "mm", "bmm", "mv")
    },
    **{
        getattr(home, name): _parse_addmm
        for home in (torch, Tensor)
        for name in ("addmm", "baddbmm", "addmv")
    },
    torch._grouped_mm: _parse_grouped,
}
if hasattr(F, "grouped_mm"):
    PRODUCTS[F.grouped_mm] = _parse_grouped


def parse_of(func: Any) -> Parse | None:
    """How to read the arguments of a function; None if it is no product."""
    if isinstance(func, torch._ops.OpOverloadPacket):
        # Transformers' own operator where torch has no grouped product.
        named = func._qualified_op_name == "transformers::grouped_mm_fallback"
        return _parse_grouped if named else None
    return PRODUCTS.get(func)
