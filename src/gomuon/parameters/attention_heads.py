"""The heads of attention: which rows of which parameters make them, and how these shrink."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gomuon.functional.attention_logits import clip_factors


@dataclass(frozen=True)
class Rows:
    """Some rows of a parameter, as outputs of a layer.

    Attributes:
        parameter: the weight or bias.
        first: the number of the first row.
        transposed: whether outputs are along the last dimension of a weight.
    """

    parameter: Tensor
    first: int
    transposed: bool = False


@dataclass(frozen=True)
class Head:
    """What makes one query or key head: rows of a weight, and of a bias if there is one.

    Attributes:
        weight: the rows of the layer.
        bias: the same of its bias.
        row: the head's first row, of those of the layer.
        size: the number of the head's rows.
    """

    weight: Rows
    bias: Rows | None
    row: int
    size: int


@dataclass(eq=False)
class ClippedAttention:
    """An attention whose weights are known.

    Attributes:
        query: the part of a projection that makes each query head.
        key: the same for the key of each query head, so a key head may appear several times.
        largest: [heads], the largest logits in this step. None: it did not run.
        ends: the ids of the weights of its queries and keys.
    """

    query: list[Head]
    key: list[Head]
    largest: Tensor | None = None
    ends: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self.ends = frozenset(map(id, self.weights))

    @property
    def weights(self) -> tuple[Tensor, Tensor]:
        """The weights of its queries and keys."""
        return self.query[0].weight.parameter, self.key[0].weight.parameter

    @property
    def maxima(self) -> Tensor:
        """[heads]: the largest logits; -inf if it did not run."""
        if self.largest is not None:
            return self.largest
        weight, _ = self.weights
        dtype = torch.promote_types(weight.dtype, torch.float32)
        return torch.full((len(self.query),), -torch.inf, dtype=dtype, device=weight.device)

    def observe(self, largest: Tensor) -> None:
        """Note the largest logits of a call."""
        self.largest = largest if self.largest is None else self.largest.maximum(largest)


class RowFactors:
    """The factors of the rows of one parameter; of several for one row the smallest counts."""

    def __init__(self, place: Rows) -> None:
        parameter = place.parameter
        self._parameter = parameter
        self._along_last = place.transposed or parameter.ndim == 1
        shape = parameter.shape
        size = shape[-1] if self._along_last else shape[:-1].numel()
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        self._factors = torch.ones(size, dtype=dtype, device=parameter.device)

    def begin(self) -> None:
        """Every factor is one again."""
        self._factors.fill_(1.0)

    def shrink(self, rows: Tensor, factors: Tensor) -> None:
        """Note factors for some rows: [heads, size] and [heads]."""
        repeated = factors.to(self._factors.dtype)[:, None].expand(rows.shape).flatten()
        self._factors.scatter_reduce_(0, rows.flatten(), repeated, "amin")

    def apply(self) -> None:
        """Multiply. On the CPU a parameter without a factor below one is not touched at all."""
        if self._parameter.device.type == "cpu" and bool((self._factors == 1).all()):
            return
        if self._along_last:
            self._parameter.mul_(self._factors)
        else:
            self._parameter.flatten(0, -2).mul_(self._factors[:, None])


def row_numbers(heads: Sequence[Head], part: str) -> tuple[Rows, Tensor] | None:
    """The rows of heads of one layer in its "weight" or "bias", [heads, size]; None: no bias."""
    place: Rows | None = getattr(heads[0], part)
    if place is None:
        return None
    first = torch.tensor([place.first + head.row for head in heads])
    numbers = first[:, None] + torch.arange(heads[0].size)
    return place, numbers.to(place.parameter.device)


class HeadClip:
    """Which rows are multiplied by which power of γ. Made once, so that a step moves no indices.

    Args:
        attentions: all that are known.
        trained: whether the weights of their queries and keys are trained at present.
    """

    def __init__(self, attentions: list[ClippedAttention], trained: list[tuple[bool, ...]]) -> None:
        self.made_for = attentions, trained
        self._factors: dict[Rows, RowFactors] = {}
        self._targets: list[list[tuple[RowFactors, Tensor, Tensor]]] = []
        uses = Counter(head for one in attentions for head in one.key)
        for one, (trains_query, trains_key) in zip(attentions, trained, strict=True):
            of_query, of_key = _powers(one, uses, trains_query=trains_query, trains_key=trains_key)
            self._targets.append([*self._rows(one.query, of_query), *self._rows(one.key, of_key)])

    def _rows(
        self, heads: list[Head], powers: list[float]
    ) -> Iterator[tuple[RowFactors, Tensor, Tensor]]:
        for part in ("weight", "bias"):
            if any(powers) and (found := row_numbers(heads, part)) is not None:
                place, numbers = found
                whole = replace(place, first=0)
                factors = self._factors.setdefault(whole, RowFactors(whole))
                yield factors, numbers, torch.tensor(powers).to(numbers.device)

    def clip(self, maxima: list[Tensor], threshold: float) -> None:
        """Multiply, given the largest logits of every attention's heads."""
        for factors in self._factors.values():
            factors.begin()
        for targets, largest in zip(self._targets, maxima, strict=True):
            gamma = clip_factors(largest, threshold)
            for factors, numbers, powers in targets:
                factors.shrink(numbers, gamma**powers)
        for factors in self._factors.values():
            factors.apply()


def _powers(
    one: ClippedAttention, uses: Counter[Head], *, trains_query: bool, trains_key: bool
) -> tuple[list[float], list[float]]:
    """The powers of γ for the rows of each head's query and key; each pair adds up to 1.

    Nothing is rescaled if neither is trained.
    """
    if not trains_query:
        of_key = [float(trains_key)] * len(one.key)
        return [0.0] * len(one.key), of_key
    if not trains_key:
        of_key = [0.0] * len(one.key)
    else:  # Kimi K2 leaves keys that heads share alone as well
        of_key = [0.5 if uses[head] == 1 else 0.0 for head in one.key]
    return [1 - power for power in of_key], of_key
