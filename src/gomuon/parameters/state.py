"""What the state of a parameter may hold: every entry's name and kind, as data.

AdamW's entries and those of every method stand here. A geometry lists its own beside the code that
writes them (`Geometry.entries`). Loading checks every entry against these tables.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from gomuon.moments import Shape

COUNT = "updates"  # what every rank keeps of every matrix, also of those other ranks own


@dataclass(frozen=True)
class Cut:
    """How a parameter is cut into matrices, as far as it is known.

    Attributes:
        memories: the shapes in which a number for each element of the matrices may be kept.
        tiling: blocks along rows and columns, and the two sides of one; None if not known.
    """

    memories: frozenset[Shape]
    tiling: tuple[int, int, int, int] | None


@dataclass(frozen=True)
class Count:
    """A whole number >= 0; with `of_step`, the number of a step that the group has made."""

    of_step: bool = False


@dataclass(frozen=True)
class Steps:
    """AdamW's count: a tensor of one whole number >= 0. A plain number becomes one on loading."""


@dataclass(frozen=True)
class Memory:
    """One number for each of the parameter's: in its own shape, or as it is cut into matrices."""

    lowest: float = -math.inf
    cut: bool = True


@dataclass(frozen=True)
class Side:
    """A tensor for the left (0) or the right (1) side of the matrices.

    Attributes:
        side: which one.
        form: "matrix" is d × d, "values" d, "diagonal" d × 1 on the left and 1 × d on the right.
        one_for: one for every "block"; for every "strip" of blocks with the same rows (on the right
            the same columns); or "either".
        numbers: what they must be. "cosines" are within [-1, 1], as all numbers of a basis are;
            "definite" is a matrix that equations are solved with.
    """

    side: int
    form: Literal["matrix", "values", "diagonal"] = "matrix"
    one_for: Literal["block", "strip", "either"] = "block"
    numbers: Literal["any", "not negative", "cosines", "semidefinite", "definite"] = "any"

    def shapes(self, tiling: tuple[int, int, int, int]) -> list[Shape]:
        """The shapes allowed, the usual one first."""
        rows, columns, *sides = tiling
        strips, blocks, d = (rows, columns)[self.side], rows * columns, sides[self.side]
        counts = {"block": [blocks], "strip": [strips], "either": [strips, blocks]}[self.one_for]
        if self.one_for == "strip" and self.side == 1 and columns == 1:
            counts = [1, rows]  # every group of a convolution has its own inputs
        return [(count, *self._last(d)) for count in counts]

    def is_possible(self, shape: Shape) -> bool:
        """Whether a tensor of this shape could be one, however the parameter is cut."""
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


ADAMW: dict[str, Entry] = {
    "step": Steps(),
    "exp_avg": Memory(cut=False),
    "exp_avg_sq": Memory(lowest=0.0, cut=False),
}
EVERY_METHOD: dict[str, Entry] = {
    **ADAMW,
    COUNT: Count(),
    "failures": Count(),
    "momentum": Memory(),
    "square": Memory(lowest=0.0),
}
# Entries that are useless without each other.
TOGETHER: tuple[tuple[str, ...], ...] = (
    tuple(ADAMW),
    ("observations", "left_factor", "right_factor"),
)


def is_blank(entries: Mapping[str, Any]) -> bool:
    """Whether a state was only allocated, not trained: see `MatrixOptimizer._allocate_state`."""
    return entries.get(COUNT) == 0


def keep_count(state: dict[str, Any]) -> None:
    """Reduce a matrix's state to what ranks keep that do not own it."""
    count = state.get(COUNT, 0)
    state.clear()
    state[COUNT] = count
