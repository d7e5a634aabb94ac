"""Which rows of a batch enter the moments."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """Which rows enter the statistics, and in which form.

    Args:
        stride: use every stride-th position of each sequence.
        skip: leave out this many positions at the start of each sequence.
        reduce: K-FAC-reduce: one row per example, with inputs averaged and gradients summed over
            positions. The default is K-FAC-expand, one row per position.
        ones: append a one to the inputs, for a bias that joins the matrix.
        rows: use at most this many rows of each forward pass, evenly spread over what `stride` and
            `skip` leave (with `reduce`, over the examples). None uses all.
    """

    stride: int = 1
    skip: int = 0
    reduce: bool = False
    ones: bool = False
    rows: int | None = None
    # Whether it matters which dimensions of a tensor are positions of a sequence.
    has_positions: bool = field(init=False, repr=False)
    # Whether all rows are used, unchanged.
    takes_all: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        has_positions = self.stride > 1 or self.skip > 0 or self.reduce
        object.__setattr__(self, "has_positions", has_positions)
        object.__setattr__(self, "takes_all", not has_positions and self.rows is None)

    def remaining(self, positions: Sequence[int]) -> int:
        """The number of positions of an example that `stride` and `skip` leave."""
        return max(0, -((self.skip - math.prod(positions)) // self.stride))

    def exceeded_by(self, batch: int, positions: Sequence[int]) -> bool:
        """Whether this batch has more rows than may be used."""
        return self.rows is not None and batch * self.remaining(positions) > self.rows

    def number(self, batch: int, positions: Sequence[int]) -> int:
        """The number of rows that are used of a batch."""
        each = self.remaining(positions)
        total = batch * (min(1, each) if self.reduce else each)
        return total if self.rows is None else min(total, self.rows)

    def bounded(self, v: Tensor) -> Tensor:
        """v, or evenly spread entries of its first dimension if these are more than `rows`."""
        if self.rows is None or len(v) <= self.rows:
            return v
        return v.index_select(0, spread_rows(len(v), self.rows, v.device))

    def places(
        self, batch: int, positions: Sequence[int], device: torch.device
    ) -> tuple[Tensor, list[Tensor]]:
        """The example and the position of every row to use, by `stride`, `skip` and `rows`.

        The position is given by its coordinates in an array with the shape `positions`.
        """
        each = self.remaining(positions)
        if self.rows is not None and batch * each > self.rows:
            index = spread_rows(batch * each, self.rows, device)
        else:
            index = torch.arange(batch * each, device=device)
        each = max(1, each)
        return index // each, unravelled(index % each * self.stride + self.skip, positions)


ALL_ROWS = Sampling()

# Cubes modulo this prime take every value once. Times a number near its golden section they jump
# about from the first few on.
_PRIME, _SECTION = 65537, 40504


def spread_rows(total: int, limit: int, device: torch.device) -> Tensor:
    """`limit` different numbers below `total` > `limit`, evenly spread and in order.

    One from each of `limit` equal stretches, at a place that differs from stretch to stretch as if
    it were random. At a fixed place, a stretch that has a factor in common with the length of the
    sequences would choose the same positions of all sequences.
    """
    traced = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
    if device.type == "cpu" and not traced:  # elsewhere a stream or a graph may own the memory
        return _kept_spread(total, limit)
    return _spread(total, limit, device)


def _spread(total: int, limit: int, device: torch.device) -> Tensor:
    stretch = torch.arange(limit, device=device)
    begin = stretch * total // limit
    length = (stretch + 1) * total // limit - begin
    cube = stretch * stretch % _PRIME * stretch % _PRIME
    return begin + cube * _SECTION % _PRIME * length // _PRIME


@lru_cache(maxsize=64)
def _kept_spread(total: int, limit: int) -> Tensor:
    """Kept, because most layers of a model use the same choice."""
    return _spread(total, limit, torch.device("cpu"))


def unravelled(index: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """The coordinates of flat indices in an array of these sizes."""
    coordinates: list[Tensor] = []
    for size in reversed(sizes):
        coordinates.insert(0, index % size)
        index = index // size
    return coordinates
