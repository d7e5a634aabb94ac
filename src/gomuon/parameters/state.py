"""The entries that a parameter's state may have: their names and kinds, as data.

The entries of AdamW and those of every method are listed here. A geometry lists its own entries
next to the code that writes them (`Geometry.entries`). Loading checks every entry.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from gomuon.moments import Shape

COUNT = "updates"  # every rank keeps this entry for every matrix, also for other owners' ones


@dataclass(frozen=True)
class Cut:
    """How a parameter is cut into matrices.

    Attributes:
        memories: the shapes that an elementwise memory may have.
        tiling: number of blocks along rows and columns, and the two sides of a block; None if not
            known.
    """

    memories: frozenset[Shape]
    tiling: tuple[int, int, int, int] | None


@dataclass(frozen=True)
class Count:
    """A whole number >= 0. With `of_step`, the number of a step that the group has taken."""

    of_step: bool = False


@dataclass(frozen=True)
class Steps:
    """AdamW's count: a tensor with one whole number >= 0. Loading converts a Python number."""


@dataclass(frozen=True)
class Memory:
    """One number per element of the parameter: in its shape, or cut into matrices."""

    lowest: float = -math.inf
    cut: bool = True


@dataclass(frozen=True)
class Side:
    """A tensor for the left (0) or the right (1) side of the matrices.

    Attributes:
        side: 0 for left, 1 for right.
        form: "matrix" is d × d, "values" is d, "diagonal" is d × 1 on the left, 1 × d on the right.
        one_for: "block": one for every block. "strip": one for every strip of blocks with the same
            rows (on the right side: the same columns). "either": both are allowed.
        numbers: the allowed values. "cosines" are in [-1, 1], as in an orthonormal basis.
            "definite" is positive definite, because equations are solved with it.
    """

    side: int
    form: Literal["matrix", "values", "diagonal"] = "matrix"
    one_for: Literal["block", "strip", "either"] = "block"
    numbers: Literal["any", "not negative", "cosines", "semidefinite", "definite"] = "any"

    def shapes(self, tiling: tuple[int, int, int, int]) -> list[Shape]:
        """The allowed shapes, the usual one first."""
        rows, columns, *sides = tiling
        strips, blocks, d = (rows, columns)[self.side], rows * columns, sides[self.side]
        counts = {"block": [blocks], "strip": [strips], "either": [strips, blocks]}[self.one_for]
        if self.one_for == "strip" and self.side == 1 and columns == 1:
            counts = [1, rows]  # each group of a convolution has its own inputs
        return [(count, *self._last(d)) for count in counts]

    def is_possible(self, shape: Shape) -> bool:
        """Whether this shape is possible for some cut of the parameter."""
        if len(shape) < 2:
            return False
        d = shape[1] if self.form != "diagonal" or self.side == 0 else shape[-1]
        return shape[1:] == self._last(d)

    def _last(self, d: int) -> Shape:
        if self.form == "matrix":
            return d, d
        if self.form == "values":
            return (d,)
        return (1, d) if self.side else (d, 1)


Entry = Count | Steps | Memory | Side
Entries = Mapping[str, Entry]


def both_sides(kind: str, **fields: Any) -> dict[str, Entry]:
    """`left_{kind}` and `right_{kind}`."""
    return {f"{name}_{kind}": Side(side, **fields) for side, name in enumerate(("left", "right"))}


ADAMW_ENTRIES: dict[str, Entry] = {
    "step": Steps(),
    "exp_avg": Memory(cut=False),
    "exp_avg_sq": Memory(lowest=0.0, cut=False),
}
EVERY_METHOD: dict[str, Entry] = {
    **ADAMW_ENTRIES,
    COUNT: Count(),
    "failures": Count(),
    "root_fallbacks": Count(),
    "momentum": Memory(),
    "square": Memory(lowest=0.0),
}
# Entries that need each other.
TOGETHER: tuple[tuple[str, ...], ...] = (
    tuple(ADAMW_ENTRIES),
    ("observations", "left_factor", "right_factor"),
)


def is_blank(entries: Mapping[str, Any]) -> bool:
    """Whether a state was only allocated, not trained: see `checkpoints/allocation.py`."""
    return entries.get(COUNT) == 0


def keep_only_count(state: dict[str, Any]) -> None:
    """Drop everything but the update count, for a rank that does not own the matrix."""
    count = state.get(COUNT, 0)
    state.clear()
    state[COUNT] = count
