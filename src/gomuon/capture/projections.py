"""Which rows of which weights make the queries and keys of an attention.

Nothing is known by name. While a model runs, recent products with its weights are remembered. When
an attention runs, each of its query heads must be one block of such a product, up to a rotation and
a factor: then the lengths of both are proportional, row by row. Rotary embeddings are rotations. A
normalisation is not, and neither is a sum with an adapter.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gomuon.parameters.attention_heads import Head, Rows

_T: Any = Tensor
_FEWEST, _SAMPLED = 4, 512  # tokens whose lengths are compared
_ADDMM = {torch.addmm, _T.addmm}
_MATMUL = {torch.matmul, torch.mm, _T.matmul, _T.mm, _T.__matmul__}


@dataclass(frozen=True)
class Projection:
    """A product with a weight that a model has just made.

    Attributes:
        weight: the rows of the weight.
        bias: those of the bias. None: there is none.
        knows_bias: whether the bias, if there is one, is a parameter or a slice of one.
        output: the product, outputs last.
    """

    weight: Rows
    bias: Rows | None
    knows_bias: bool
    output: Tensor


def projection_of(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, known: Mapping[int, str]
) -> Projection | None:
    """The projection that a function of torch has computed; None if it is none.

    `known` has the ids of the model's parameters.
    """
    bias: Any = None
    if func is F.linear:
        given = [*args, *(kwargs[name] for name in ("input", "weight")[len(args) :])]
        weight = _rows_of(given[1], known)
        bias = given[2] if len(given) > 2 else kwargs.get("bias")
    elif func in _ADDMM and len(args) == 3 and not kwargs:
        bias, weight = args[0], _rows_of(args[2].mT, known)
    elif func in _MATMUL and len(args) == 2 and isinstance(args[1], Tensor) and args[1].ndim == 2:
        weight = _rows_of(args[1].mT, known)
    else:
        return None
    if weight is None:
        return None
    of_bias = None if bias is None else _rows_of(bias, known)
    return Projection(weight, of_bias, bias is None or of_bias is not None, result)


def _rows_of(tensor: Tensor, known: Mapping[int, str]) -> Rows | None:
    """The rows that a tensor is of a parameter: all of them, or a slice."""
    parameter = tensor if id(tensor) in known else tensor._base
    if parameter is None or id(parameter) not in known or not parameter.is_contiguous():
        return None
    offset: int = tensor.storage_offset() - parameter.storage_offset()  # type: ignore[assignment]
    if tensor.ndim == 1:
        whole = parameter.ndim == 1 and tensor.stride() == parameter.stride()
        return Rows(parameter, offset) if whole else None
    if tensor.ndim != 2 or parameter.ndim < 2:
        return None
    width = parameter.shape[-1]
    if tensor.stride() == (width, 1) and tensor.shape[1] == width:
        return Rows(parameter, offset // width)
    turned = tensor.stride() == (1, width) and parameter.ndim == 2
    if turned and tensor.shape[1] == parameter.shape[0]:
        return Rows(parameter, offset, transposed=True)
    return None


class Undecided(Exception):
    """This forward pass does not tell which rows make which head; a later one will."""


def heads_of(states: Tensor, projections: Sequence[Projection]) -> tuple[int, list[Head]] | None:
    """The projection that made queries or keys, by number, and its part for each head.

    Args:
        states: [..., heads, l, d] or [examples · heads, l, d], queries or keys of an attention.
        projections: recent products, the latest last.

    Raises:
        Undecided: several parts would do, as with equal weights, equal tokens, or none but zeros.
    """
    if states.ndim > 3:
        return _heads_of(states.detach(), projections)
    numbers = {
        states.shape[:-1].numel() * one.output.shape[-1] // max(1, one.output.numel())
        for one in projections
    }
    for heads in sorted(numbers):
        if heads and states.shape[0] % heads == 0:
            found = _heads_of(states.detach().unflatten(0, (-1, heads)), projections)
            if found is not None:
                return found
    return None


def _heads_of(states: Tensor, projections: Sequence[Projection]) -> tuple[int, list[Head]] | None:
    d = states.shape[-1]
    wanted = _row_lengths(states)
    if len(wanted) < _FEWEST or not bool(wanted.any()):
        raise Undecided
    found: list[tuple[int, Tensor]] = []  # [heads, blocks] that fit, by projection
    for number, projection in enumerate(projections):
        for lengths in _lengths_of(projection.output.detach(), states):
            rounding = max(torch.finfo(x.dtype).eps for x in (states, projection.output))
            found.append((number, _proportional(wanted, lengths, rounding)))
    if sum((fits.sum(1) for _, fits in found), torch.zeros(())).gt(1).any():
        raise Undecided
    for number, fits in found:
        if bool(fits.any(1).all()):
            weight, bias = projections[number].weight, projections[number].bias
            blocks = fits.int().argmax(1).tolist()
            return number, [Head(weight, bias, block * d, d) for block in blocks]
    return None


def _row_lengths(states: Tensor) -> Tensor:
    """[tokens, heads]: the lengths of queries or keys."""
    heads = states.shape[-3]
    lengths = torch.linalg.vector_norm(states.float(), dim=-1)  # [..., heads, l]
    return lengths.mT.reshape(-1, heads)


def _lengths_of(output: Tensor, states: Tensor) -> Iterator[Tensor]:
    """[tokens, blocks]: the lengths of a projection's blocks, with tokens in both orders."""
    length, d = states.shape[-2:]
    tokens = states.shape[:-3].numel() * length
    if not output.numel() or output.numel() != tokens * output.shape[-1] or output.shape[-1] < d:
        return
    blocks = output.shape[-1] // d
    parts = output.reshape(tokens, -1)[:, : blocks * d].unflatten(-1, (blocks, d))
    lengths = torch.linalg.vector_norm(parts.float(), dim=-1)
    yield lengths
    if 1 < length < tokens:  # positions before examples
        yield lengths.unflatten(0, (length, -1)).transpose(0, 1).flatten(0, 1)


def _proportional(heads: Tensor, blocks: Tensor, rounding: float) -> Tensor:
    """[heads, blocks]: whether the lengths of a head and of a block are proportional."""
    step = max(1, len(heads) // _SAMPLED)
    of_heads, of_blocks = heads[::step, :, None], blocks[::step, None, :]
    ratios = torch.where((of_heads == 0) & (of_blocks == 0), torch.nan, of_heads / of_blocks)
    middle = ratios.nanmedian(0).values
    deviation = (ratios / middle - 1).abs().nan_to_num(0.0, torch.inf).amax(0)
    tolerance = max(1e-3, 2 * rounding)  # 1.6e-2 in bfloat16
    return (deviation <= tolerance) & middle.isfinite() & (middle > 0)
