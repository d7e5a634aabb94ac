"""The entries that a parameter's state may have: their names and kinds, as data.

The entries of AdamW and those of every method are listed here. A geometry lists its own entries
next to the code that writes them (`Geometry.entries`). Loading checks every entry.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from gomuon.moments import Shape
from gomuon.parameters.tiling import Tiling

COUNT = "updates"
INTERVAL = "interval"  # of refreshes, if the layer's clock adapts
# Every rank keeps these entries for every matrix, also for other owners' ones.
EVERYWHERE = (COUNT, INTERVAL)
MOMENTUM = "momentum"
SQUARE = "square"
SCALES = "momentum_scales"  # of a momentum in 8 bits, see `functional/narrow.py`


@dataclass(frozen=True)
class Cut:
    """How a parameter is cut into matrices.

    Attributes:
        memories: the shapes that an elementwise memory may have.
        tiling: its matrices and their blocks; None if not known.
    """

    memories: frozenset[Shape]
    tiling: Tiling | None


@dataclass(frozen=True)
class Count:
    """A whole number >= 0. With `of_step`, the number of a step that the group has taken."""

    of_step: bool = False


@dataclass(frozen=True)
class EachCount:
    """For each matrix of a stack, a whole number >= 0 that is at most the group's steps."""


@dataclass(frozen=True)
class Steps:
    """AdamW's count: a tensor with one whole number >= 0. Loading converts a Python number."""


@dataclass(frozen=True)
class Memory:
    """One number per element of the parameter: in its shape, or cut into matrices."""

    lowest: float = -math.inf
    cut: bool = True


@dataclass(frozen=True)
class Scales:
    """The scales of a momentum in 8 bits: one for 128 elements of each block."""


@dataclass(frozen=True)
class FewNumbers:
    """A few numbers for every block, blocks × 1 × `count`. They are kept as computed."""

    count: int = 1
    lowest: float = -math.inf


@dataclass(frozen=True)
class Side:
    """A tensor for the left (0) or the right (1) side of the matrices.

    Attributes:
        side: 0 for left, 1 for right.
        form: "matrix" is d × d, "values" is d, "diagonal" is d × 1 on the left, 1 × d on the right.
            "columns" is d × k for some k ≤ d.
        one_for: "block": one for every block. "strip": one for every strip of blocks with the same
            rows (on the right side: the same columns). "either": both are allowed.
        numbers: the allowed values. "cosines" are in [-1, 1], as in an orthonormal basis.
            "definite" is positive definite, because equations are solved with it.
        cut: the side may be cut into blocks: "matrix" may also be blocks × s × s or a diagonal, and
            "values" may also be blocks × s.
        wide: it is kept as computed also if `state_dtype` asks for fewer bits, because what is made
            of it depends on eigenvalues that rounding would change.
    """

    side: int
    form: Literal["matrix", "values", "diagonal", "columns"] = "matrix"
    one_for: Literal["block", "strip", "either"] = "block"
    numbers: Literal["any", "not negative", "cosines", "semidefinite", "definite"] = "any"
    cut: bool = False
    wide: bool = False

    def shapes(self, tiling: Tiling) -> list[Shape]:
        """The allowed shapes of a side that is not cut, the usual one first."""
        d = tiling.sides[self.side]
        return [(count, *self._last(d)) for count in self._counts(tiling)]

    def allows(self, shape: Shape, tiling: Tiling) -> bool:
        """Whether a tensor may have this shape."""
        if shape in self.shapes(tiling):
            return True
        low, high = self.lengths(shape)
        return low <= tiling.sides[self.side] <= high and shape[0] in self._counts(tiling)

    def lengths(self, shape: Shape) -> tuple[int, int]:
        """The least and the greatest length that a side of this shape may have; (0, 0) for none."""
        last = shape[1:]
        if self.form == "columns":
            return (last[0], last[0]) if len(last) == 2 and 1 <= last[1] <= last[0] else (0, 0)
        if last and last == self._last(d := max(last)):
            return d, d
        if self.cut and self.form == "matrix" and last == self._diagonal(max(last, default=0)):
            return max(last), max(last)
        blocks = self.cut and len(last) == (3 if self.form == "matrix" else 2) and last[0] > 1
        if not blocks or (self.form == "matrix" and last[1] != last[2]):
            return 0, 0
        return (last[0] - 1) * last[-1] + 1, last[0] * last[-1]

    def _counts(self, tiling: Tiling) -> list[int]:
        strips, blocks = tiling.strips[self.side], tiling.blocks
        counts = {"block": [blocks], "strip": [strips], "either": [strips, blocks]}[self.one_for]
        if self.one_for == "strip" and self.side == 1 and tiling.strips[1] == 1:
            return [1, tiling.rows]  # each group of a convolution has its own inputs
        return counts

    def _last(self, d: int) -> Shape:
        if self.form == "diagonal":
            return self._diagonal(d)
        return (d,) if self.form == "values" else (d, d)

    def _diagonal(self, d: int) -> Shape:
        return (1, d) if self.side else (d, 1)


Entry = Count | EachCount | Steps | Memory | Scales | FewNumbers | Side
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
    INTERVAL: Count(),
    "failures": Count(),
    "root_fallbacks": Count(),
    MOMENTUM: Memory(),
    SCALES: Scales(),
    SQUARE: Memory(lowest=0.0),
}
# Entries that need each other.
TOGETHER: tuple[tuple[str, ...], ...] = (
    tuple(ADAMW_ENTRIES),
    ("observations", "left_factor", "right_factor"),
)


def wide_entries(entries: Entries) -> frozenset[str]:
    """The names of those that are kept as computed whatever `state_dtype` says."""
    return frozenset(
        name
        for name, entry in entries.items()
        if isinstance(entry, (EachCount, FewNumbers)) or (isinstance(entry, Side) and entry.wide)
    )


def is_blank(entries: Mapping[str, Any]) -> bool:
    """Whether a state was only allocated, not trained: see `checkpoints/allocation.py`."""
    return entries.get(COUNT) == 0


def keep_only_count(state: dict[str, Any]) -> None:
    """Drop everything but the entries of every rank, for a rank that does not own the matrix."""
    kept = {name: state[name] for name in EVERYWHERE if name in state}
    state.clear()
    state.update({COUNT: 0, **kept})
